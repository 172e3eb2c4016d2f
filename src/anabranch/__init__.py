"""Kinesis for Python: read and write Amazon Kinesis Data Streams in order, without losing a record."""

from anabranch._version import __version__

__all__ = ["__version__"]
