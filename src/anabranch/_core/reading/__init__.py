"""How a shard is read: its lifecycle, the pace of polling, the window of what is prefetched."""
