"""From finished records to committed ones, and how a shard comes to rest."""
