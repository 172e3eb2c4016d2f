"""How records reach handlers: order lanes, batches, and what follows a failure."""
