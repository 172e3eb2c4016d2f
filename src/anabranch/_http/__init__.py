"""The small HTTP/1.1 and HTTP/2 machinery: the client's connections, and the server of the local Kinesis.

It moves requests and responses and knows nothing of AWS.
"""
