"""Rows as flat fields, and as JSON for stores that keep bytes.

The fields are made to be read by people: `owner` is a member, `count` grows with every write, `checkpoint` is the
position up to which all records are handled. SQLite has a column for each; the few lists are JSON.
"""

from collections.abc import Callable
from typing import Any, Final, NamedTuple, cast, get_args

import msgspec

from anabranch._core.leases.status import shards_json
from anabranch._model.hash_keys import HashKeyRange, parse_hash_key
from anabranch._model.leases import (
    AppRow,
    ControlRow,
    LeaseRow,
    MemberRow,
    OpenKey,
    ShardStatus,
    StatusRow,
    Stopped,
    StreamRow,
    SubscriptionStatus,
)
from anabranch._model.streams import Position, StartingPosition, at_timestamp
from anabranch.reasons import Reason, parse_reason
from anabranch.stores.row_store import KINDS, Kind, Row

Columns = tuple[Any, ...]
Fields = dict[str, Any]

APP_COLUMNS: Final = (
    "application",
    "app_id",
    "created_wall_ms",
    "incarnation",
    "watch",
    "place",
    "other_store",
    "extra",
)
STREAM_COLUMNS: Final = (
    "application", "app_id", "stream", "name", "arn", "created_seconds", "origin", "generation", "bootstrapped",
    "consumer_name", "consumer_arn", "consumer_state", "count", "extra",
)  # fmt: skip
LEASE_COLUMNS: Final = (
    "application", "app_id", "stream", "generation", "shard", "owner", "count", "checkpoint", "completed", "epoch",
    "starts_at", "waits_for", "hash_key_range", "frontier", "open_keys", "seek_epoch", "order_mode",
    "seen_through_seconds", "finish_reason", "children", "stopped_reason", "stopped_position", "stopped_partition_key",
    "stopped_member",
    "stopped_wall_ms", "paused", "takes_without_progress", "records_handled", "checkpointed_wall_ms",
    "extra",
)  # fmt: skip
MEMBER_COLUMNS: Final = (
    "application", "app_id", "member", "counter", "state", "expiry_ms", "protocol", "order_mode", "streams",
    "shards_max", "load", "change_count", "changed", "reads_healthy", "draining", "wanted", "joined_wall_ms", "extra",
)  # fmt: skip
STATUS_COLUMNS: Final = (
    "application", "app_id", "member", "revision", "shard_count", "stalled_count", "millis_behind_latest",
    "records_per_second", "shards", "extra",
)  # fmt: skip
CONTROL_COLUMNS: Final = (
    "application", "app_id", "command", "action", "stream", "generation", "shard", "arguments", "requested_by",
    "requested_wall_ms", "state", "result", "extra",
)  # fmt: skip


class _StoredOpenKey(msgspec.Struct, array_like=True):
    digest: str
    first_open: str
    attempts: int
    state: str
    error_type: str = ""
    fingerprint: str = ""


class _StoredShardStatus(msgspec.Struct, array_like=True):
    """A `ShardStatus` whose reason this version may not know."""

    lease: str
    reason: Any = None
    millis_behind_latest: int | None = None
    records_per_second: float = 0.0
    subscription: SubscriptionStatus | None = None
    lag_ms: int | None = None
    retention_left_seconds: int | None = None
    handled_through_seconds: float | None = None


_STRINGS = msgspec.json.Decoder(tuple[str, ...])
_OPEN_KEYS = msgspec.json.Decoder(tuple[_StoredOpenKey, ...])
_SHARDS = msgspec.json.Decoder(tuple[_StoredShardStatus, ...])
_ARGUMENTS = msgspec.json.Decoder(dict[str, str])
_EXTRA = msgspec.json.Decoder(dict[str, Any])


def _json(value: object) -> str:
    return msgspec.json.encode(value).decode()


# applications
def app_columns(row: AppRow) -> Columns:
    return (
        row.app, row.app_id, row.created_wall_ms, row.incarnation, row.watch, row.place, row.other_store,
        _json(row.extra),
    )  # fmt: skip


def app_row(columns: Columns) -> AppRow:
    column = dict(zip(APP_COLUMNS, columns, strict=True))
    return msgspec.convert(column | {"app": column["application"], "extra": _EXTRA.decode(column["extra"])}, AppRow)


# streams
def stream_columns(app: str, app_id: str, row: StreamRow) -> Columns:
    fanout = row.fanout
    return (
        app, app_id, row.stream_key, row.name, row.arn, row.created_seconds, _start_text(row.origin), row.generation,
        int(row.bootstrapped), fanout and fanout.name, fanout and fanout.arn, fanout and fanout.state, row.version,
        _json(row.extra),
    )  # fmt: skip


def stream_row(columns: Columns) -> StreamRow:
    column = dict(zip(STREAM_COLUMNS, columns, strict=True))
    return msgspec.convert(
        column
        | {
            "stream_key": column["stream"],
            "origin": _start(column["origin"]),
            "bootstrapped": bool(column["bootstrapped"]),
            "fanout": _fanout(column),
            "version": column["count"],
            "extra": _EXTRA.decode(column["extra"]),
        },
        StreamRow,
    )


def _fanout(column: Fields) -> Fields | None:
    if column["consumer_state"] is None:
        return None
    return {"name": column["consumer_name"], "arn": column["consumer_arn"], "state": column["consumer_state"]}


# leases
def lease_columns(app: str, app_id: str, row: LeaseRow) -> Columns:
    checkpoint, finish, stopped = row.checkpoint, row.finish, row.stopped
    return (
        app, app_id, row.key.stream_key, row.key.generation, row.key.shard_id, row.owner, row.version,
        _position_text(checkpoint.watermark), int(row.is_finished), row.epoch, _start_text(row.start),
        _json(row.waits_for), _range_text(row.hash_key_range), _position_text(checkpoint.frontier),
        _json([_stored_open_key(key) for key in checkpoint.open_keys]),
        checkpoint.seek_epoch, checkpoint.order, checkpoint.seen_through_seconds,
        finish and finish.reason, _json(finish.children if finish else ()),
        stopped and _json(stopped.reason), stopped and _position_text(stopped.position),
        stopped and stopped.partition_key, stopped and stopped.member_id, stopped and stopped.at_wall_ms,
        int(row.paused), row.takes_without_progress, row.records_handled, row.checkpointed_at_wall_ms,
        _json(row.extra),
    )  # fmt: skip


def lease_row(columns: Columns) -> LeaseRow:
    column = dict(zip(LEASE_COLUMNS, columns, strict=True))
    return msgspec.convert(
        column
        | {
            "key": _key(column),
            "start": _start(column["starts_at"]),
            "waits_for": _STRINGS.decode(column["waits_for"]),
            "hash_key_range": _range(column["hash_key_range"]),
            "version": column["count"],
            "checkpoint": {
                "watermark": _position(column["checkpoint"]),
                "frontier": _position(column["frontier"]),
                "open_keys": _open_keys(column["open_keys"]),
                "seek_epoch": column["seek_epoch"],
                "order": column["order_mode"],
                "seen_through_seconds": column["seen_through_seconds"],
            },
            "finish": _finish(column),
            "stopped": _stopped(column),
            "paused": bool(column["paused"]),
            "checkpointed_at_wall_ms": column["checkpointed_wall_ms"],
            "extra": _EXTRA.decode(column["extra"]),
        },
        LeaseRow,
    )


def _key(column: Fields) -> Fields:
    return {"stream_key": column["stream"], "generation": column["generation"], "shard_id": column["shard"]}


def _finish(column: Fields) -> Fields | None:
    if not column["completed"]:
        return None
    return {"reason": column["finish_reason"], "children": _STRINGS.decode(column["children"])}


def _stopped(column: Fields) -> Stopped | None:
    if column["stopped_reason"] is None:
        return None
    names = ("stopped_partition_key", "stopped_member", "stopped_wall_ms")
    partition_key, member_id, at_wall_ms = msgspec.convert(
        [column[name] for name in names], tuple[str | None, str, int]
    )
    position = _position(column["stopped_position"])
    return Stopped(_reason(column["stopped_reason"]), position, partition_key, member_id, at_wall_ms)


def _reason(text: str) -> Reason:
    try:
        return parse_reason(msgspec.json.decode(text))
    except msgspec.DecodeError:
        return parse_reason(text)  # an earlier version wrote plain text


def _stored_open_key(key: OpenKey) -> tuple[str | int, ...]:
    stored = (key.digest.hex(), str(key.first_open), key.attempts, key.state)
    return (*stored, key.error_type, key.fingerprint) if key.error_type or key.fingerprint else stored


def _open_keys(text: str) -> list[Fields]:
    return [
        msgspec.structs.asdict(stored)
        | {"digest": bytes.fromhex(stored.digest), "first_open": Position.parse(stored.first_open)}
        for stored in _OPEN_KEYS.decode(text)
    ]


# members
def member_columns(app: str, app_id: str, row: MemberRow) -> Columns:
    return (
        app, app_id, row.member_id, row.counter, row.state, row.expiry_ms, row.protocol, row.order,
        " ".join(row.streams), row.shards_max, row.load, row.change_count, " ".join(row.changed),
        int(row.reads_healthy), int(row.draining), " ".join(row.wanted), row.joined_wall_ms, _json(row.extra),
    )  # fmt: skip


def member_row(columns: Columns) -> MemberRow:
    column = dict(zip(MEMBER_COLUMNS, columns, strict=True))
    return msgspec.convert(
        column
        | {
            "member_id": column["member"],
            "order": column["order_mode"],
            "streams": tuple(column["streams"].split()),
            "changed": tuple(column["changed"].split()),
            "reads_healthy": bool(column["reads_healthy"]),
            "draining": bool(column["draining"]),
            "wanted": tuple(column["wanted"].split()),
            "extra": _EXTRA.decode(column["extra"]),
        },
        MemberRow,
    )


def status_columns(app: str, app_id: str, row: StatusRow) -> Columns:
    return (
        app, app_id, row.member_id, row.revision, row.shard_count, row.stalled_count, row.millis_behind_latest,
        row.records_per_second, shards_json(row.shards), _json(row.extra),
    )  # fmt: skip


def status_row(columns: Columns) -> StatusRow:
    column = dict(zip(STATUS_COLUMNS, columns, strict=True))
    return msgspec.convert(
        column
        | {
            "member_id": column["member"],
            "shards": [_shard_status(stored) for stored in _SHARDS.decode(column["shards"])],
            "extra": _EXTRA.decode(column["extra"]),
        },
        StatusRow,
    )


def _shard_status(stored: _StoredShardStatus) -> ShardStatus:
    reason = None if stored.reason is None else parse_reason(stored.reason)
    return ShardStatus(
        stored.lease,
        reason,
        stored.millis_behind_latest,
        stored.records_per_second,
        stored.subscription,
        stored.lag_ms,
        stored.retention_left_seconds,
        stored.handled_through_seconds,
    )


# commands
def control_columns(app: str, app_id: str, row: ControlRow) -> Columns:
    key = row.key
    return (
        app, app_id, row.command_id, row.action, key and key.stream_key, key and key.generation, key and key.shard_id,
        _json(row.arguments), row.requested_by, row.requested_wall_ms, row.state, row.result, _json(row.extra),
    )  # fmt: skip


def control_row(columns: Columns) -> ControlRow:
    column = dict(zip(CONTROL_COLUMNS, columns, strict=True))
    return msgspec.convert(
        column
        | {
            "command_id": column["command"],
            "key": None if column["stream"] is None else _key(column),
            "arguments": _ARGUMENTS.decode(column["arguments"]),
            "extra": _EXTRA.decode(column["extra"]),
        },
        ControlRow,
    )


# values
def _position_text(position: Position | None) -> str | None:
    return None if position is None else str(position)


def _position(text: str | None) -> Position | None:
    return None if text is None else Position.parse(text)


def _range_text(hash_key_range: HashKeyRange | None) -> str | None:
    return None if hash_key_range is None else f"{hash_key_range.start}-{hash_key_range.end}"


def _range(text: str | None) -> HashKeyRange | None:
    if text is None:
        return None
    start, _, end = text.partition("-")
    return HashKeyRange(parse_hash_key(start), parse_hash_key(end))


def _start_text(start: StartingPosition) -> str:
    """`TRIM_HORIZON`, `AT_TIMESTAMP 1700000000.5`, `AFTER_SEQUENCE_NUMBER 49590…`."""
    if start.timestamp_seconds is not None:
        return f"{start.type} {start.timestamp_seconds!r}"
    return start.type if start.sequence_number is None else f"{start.type} {start.sequence_number}"


def _start(text: str) -> StartingPosition:
    kind, _, argument = text.partition(" ")
    if kind == "AT_TIMESTAMP":
        return at_timestamp(float(argument))
    return msgspec.convert({"type": kind, "sequence_number": argument or None}, StartingPosition)


class RowCodec(NamedTuple):
    columns: tuple[str, ...]
    flatten: Callable[[str, str, Any], Columns]
    """The columns of a row, from its application, `app_id` and the row."""
    read: Callable[[Columns], Any]
    """The row, from its columns."""


CODECS: Final[dict[Kind, RowCodec]] = {
    "app": RowCodec(APP_COLUMNS, lambda _, __, row: app_columns(row), app_row),
    "stream": RowCodec(STREAM_COLUMNS, stream_columns, stream_row),
    "lease": RowCodec(LEASE_COLUMNS, lease_columns, lease_row),
    "member": RowCodec(MEMBER_COLUMNS, member_columns, member_row),
    "status": RowCodec(STATUS_COLUMNS, status_columns, status_row),
    "command": RowCodec(CONTROL_COLUMNS, control_columns, control_row),
}


# JSON
_PLACE: Final = frozenset({"application", "app_id"})
"""These fields are part of a row's key, and not stored again in its value."""
_ADDED: Final = ("consumer_name", "consumer_arn", "consumer_state")
"""Rows of earlier versions do not have these."""
_FIELDS: Final = {kind: codec.columns for kind, codec in CODECS.items()} | {"app": ("app", "id", *APP_COLUMNS[2:])}


def encode_row(row: Row) -> bytes:
    """A row as JSON, with the fields of a newer version beside those that this one knows."""
    kind = KINDS[type(row)]
    fields = dict(zip(_FIELDS[kind], CODECS[kind].flatten("", "", row), strict=True))
    extra = _EXTRA.decode(fields.pop("extra"))
    return msgspec.json.encode(extra | {name: value for name, value in fields.items() if name not in _PLACE})


def decode_row(kind: Kind, data: bytes) -> Row:
    """The opposite of `encode_row`. Raises `ValueError` if the bytes are not a row of that kind."""
    if kind not in CODECS:
        raise ValueError(f"unknown kind of row {kind!r}; the kinds are {', '.join(get_args(Kind))}")
    names = _FIELDS[kind]
    fields = _EXTRA.decode(data)
    extra = {name: value for name, value in fields.items() if name not in names}
    known = dict.fromkeys(_ADDED) | fields | {"extra": _json(extra)}
    missing = [name for name in names if name not in known and name not in _PLACE]
    if missing:
        raise ValueError(f"a row of kind {kind!r} must have the fields {', '.join(missing)}")
    return cast("Row", CODECS[kind].read(tuple(known.get(name, "") for name in names)))
