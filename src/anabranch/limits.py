"""AWS's quotas and the protocol's fixed numbers, each with its source.

They are facts, not settings. `API` is the Amazon Kinesis Data Streams API Reference, `GUIDE` its Developer Guide
("Quotas and limits").
"""

from typing import Final

KIB: Final = 1 << 10
MIB: Final = 1 << 20

# Hash keys (API, HashKeyRange): 128 bits, ranges inclusive at both ends.
HASH_KEY_MAX: Final = (1 << 128) - 1

# Records (API, PutRecords; UpdateMaxRecordSize): data plus partition key.
PARTITION_KEY_CHARACTERS_MAX: Final = 256
RECORD_BYTES_DEFAULT_MAX: Final = 1 * MIB
RECORD_BYTES_MAX: Final = 10 * MIB
PUT_RECORDS_ENTRIES_MAX: Final = 500
PUT_RECORDS_BYTES_MAX: Final = 10 * MIB  # the request, partition keys included

# Per shard and second (GUIDE).
SHARD_WRITE_BYTES_PER_SECOND: Final = 1 * MIB
SHARD_WRITE_RECORDS_PER_SECOND: Final = 1000
SHARD_WRITE_BURST_BYTES: Final = 10 * MIB  # enough for one 10 MiB record; refilled at 1 MiB per second
SHARD_READ_BYTES_PER_SECOND: Final = 2 * MIB
SHARD_READS_PER_SECOND: Final = 5  # GetRecords; shared by all polling applications of the stream

# GetRecords and iterators (API).
GET_RECORDS_BYTES_MAX: Final = 10 * MIB
GET_RECORDS_COUNT_MAX: Final = 10_000
SHARD_ITERATOR_LIFETIME_MS: Final = 300_000
GET_SHARD_ITERATOR_PER_SECOND: Final = 5  # per open shard

# Listings (API).
LIST_SHARDS_RESULTS_MAX: Final = 10_000
LIST_SHARDS_TOKEN_LIFETIME_MS: Final = 300_000

# Enhanced fan-out (API, SubscribeToShard).
SUBSCRIPTION_LIFETIME_MS: Final = 300_000
SUBSCRIPTION_TAKE_OVER_MS: Final = 5_000  # a new subscription within this time fails with ResourceInUseException
SUBSCRIBE_PER_SECOND: Final = 1  # per consumer and shard
CONSUMERS_PER_STREAM_MAX: Final = 20
CONSUMERS_PER_STREAM_ADVANTAGE_MAX: Final = 50  # on-demand advantage accounts
CONSUMERS_CREATING_MAX: Final = 5

# Streams (API).
RETENTION_HOURS_MIN: Final = 24
RETENTION_HOURS_MAX: Final = 8_760
ON_DEMAND_SHARD_COUNT: Final = 4  # CreateStream without a ShardCount
STREAM_NAME_CHARACTERS_MAX: Final = 128
TAGS_PER_STREAM_MAX: Final = 50
UPDATE_SHARD_COUNT_PER_DAY: Final = 10
