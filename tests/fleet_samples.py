"""A healthy member and a healthy shard, as a fleet's status shows them. Tests replace the fields that they check."""

from anabranch.reports import FleetMember, FleetShard

MEMBER = FleetMember(
    member_id="a#1",
    worker_id="a",
    state="live",
    heartbeat_seen=True,
    heartbeat_age=0.4,
    expiry=10.0,
    joined_seconds=0.0,
    shard_count=1,
    shards_max=None,
    records_per_second=12.0,
    reads_healthy=True,
    draining=False,
)
SHARD = FleetShard(
    stream="orders",
    shard_id="shardId-000000000001",
    state="reading",
    reason=None,
    owner="a#1",
    worker_id="a",
    checkpoint="49:3",
    starts_at="TRIM_HORIZON",
    checkpointed_seconds=None,
    lag=1.5,
    retention_left=86_398.5,
    millis_behind_latest=1_500,
    records_per_second=12.0,
    records_handled=40,
    waits_for=(),
    children=(),
    stopped=None,
    takes_without_progress=0,
    fence_token=1,
)
