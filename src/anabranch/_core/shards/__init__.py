"""Lineage: which shards there are, who descends from whom, and where a hash key goes."""
