"""Who owns which shard: members, heartbeats, the seal, the fence, fair balance."""
