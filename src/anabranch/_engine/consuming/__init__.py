"""One run of a consumer: a worker that wires all the other parts together, and what starts, watches and ends it."""
