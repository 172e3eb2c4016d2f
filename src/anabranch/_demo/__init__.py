"""`anabranch demo`: the whole product on one machine, beside a plain loop, with an audit of both at the end.

A local Kinesis, a producer, a fleet of three worker processes, and an ordinary loop over the AWS client. Shards split
and merge and workers are killed while it runs. Every number that it shows was measured in this run.
"""
