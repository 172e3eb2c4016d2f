"""`anabranch demo`: a local Kinesis, a producer, three worker processes, and the alternatives that people use instead.

Meanwhile shards are split and merged, and processes are killed. The audit at the end counts the outcome of each record.
"""
