"""How records reach the stream."""
