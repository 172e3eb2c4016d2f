"""How records reach the stream: shard map, aggregation, limiter, collection, retries, order lanes."""
