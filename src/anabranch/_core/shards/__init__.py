"""Lineage: which shards there are, and which descends from which."""
