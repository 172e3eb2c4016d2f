"""From records in flight to a position that is safe to commit."""
