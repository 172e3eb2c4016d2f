"""A small HTTP/1.1 and HTTP/2 client, and the server of the local Kinesis.

It knows nothing of AWS.
"""
