"""Lease stores: where a fleet keeps its leases, checkpoints and members; and what a store of your own is built from."""

from anabranch._model.leases import (
    AppRow,
    Checkpoint,
    Conflict,
    ControlRow,
    FanOutConsumer,
    Finish,
    HandOffRequest,
    HeartbeatAnswer,
    HeartbeatWrite,
    LeaseKey,
    LeaseRow,
    LeaseRows,
    MemberRow,
    OpenKey,
    Place,
    Poll,
    ShardStatus,
    StatusRow,
    Stopped,
    StreamRow,
    SubscriptionStatus,
)
from anabranch._ports import LeaseStore
from anabranch.stores.dynamodb import DynamoDbLeaseStore
from anabranch.stores.memory import MemoryLeaseStore
from anabranch.stores.redis import RedisAddress, RedisLeaseStore
from anabranch.stores.row_codec import decode_row, encode_row
from anabranch.stores.row_store import Changed, Found, Row, RowKey, RowLeaseStore, Scope, Update
from anabranch.stores.s3 import S3LeaseStore
from anabranch.stores.sqlite import SqliteLeaseStore
from anabranch.stores.urls import default_store, open_store

__all__ = [
    "AppRow",
    "Changed",
    "Checkpoint",
    "Conflict",
    "ControlRow",
    "DynamoDbLeaseStore",
    "FanOutConsumer",
    "Finish",
    "Found",
    "HandOffRequest",
    "HeartbeatAnswer",
    "HeartbeatWrite",
    "LeaseKey",
    "LeaseRow",
    "LeaseRows",
    "LeaseStore",
    "MemberRow",
    "MemoryLeaseStore",
    "OpenKey",
    "Place",
    "Poll",
    "RedisAddress",
    "RedisLeaseStore",
    "Row",
    "RowKey",
    "RowLeaseStore",
    "S3LeaseStore",
    "Scope",
    "ShardStatus",
    "SqliteLeaseStore",
    "StatusRow",
    "Stopped",
    "StreamRow",
    "SubscriptionStatus",
    "Update",
    "decode_row",
    "default_store",
    "encode_row",
    "open_store",
]
