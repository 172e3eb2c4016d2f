"""The operations of the Kinesis API, by noun. Importing this package registers all of them."""

from anabranch.local.actions import consumers, records, resources, shards, streams  # noqa: F401
