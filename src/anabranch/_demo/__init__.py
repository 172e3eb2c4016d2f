"""`anabranch demo`: the whole product on one machine next to a plain boto3 loop, with an audit of both at the end.

It runs a local Kinesis, a producer, three worker processes and a plain loop over the AWS client. Shards split and merge
and workers are killed meanwhile. Every number shown was measured in this run.
"""
