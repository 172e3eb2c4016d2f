"""What there is to read, and reading it."""
