"""Adapters to AWS: the Kinesis data-plane client, credentials, and the one table of error codes."""
