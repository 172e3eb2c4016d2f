"""What the engine needs from the world, as protocols: clock, Kinesis, lease store.

Adapters in `_aws` and `stores` fulfil them for production, `testing` fulfils them for whole simulated fleets.
"""
