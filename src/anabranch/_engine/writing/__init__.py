"""The producer: from a put to its outcome."""
