"""From a shard's records to the caller's code: lanes are performed here, calls made, timed and ended."""
