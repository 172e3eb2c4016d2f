"""Rows as flat fields, and as JSON for stores that keep bytes.

The fields are made to be read by people: `owner` is a member, `count` grows with every write, `checkpoint` is the
position up to which all records are handled. SQLite has a column for each; the few lists are JSON.
"""

from collections.abc import Callable
from typing import Any, Final, get_args

import msgspec

from anabranch._model.hash_keys import HashKeyRange, parse_hash_key
from anabranch._model.leases import (
    AppRow,
    ControlRow,
    HandOffRequest,
    LeaseRow,
    MemberRow,
    ShardStatus,
    StatusRow,
    StreamRow,
)
from anabranch._model.streams import Position, StartingPosition, at_timestamp
from anabranch.stores.row_store import Kind, Row

Columns = tuple[Any, ...]
Fields = dict[str, Any]

APP_COLUMNS: Final = ("application", "app_id", "created_wall_ms", "incarnation", "watch", "extra")
STREAM_COLUMNS: Final = (
    "application", "app_id", "stream", "name", "arn", "created_seconds", "origin", "generation", "bootstrapped",
    "count", "extra",
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
    "application", "app_id", "member", "worker", "counter", "state", "expiry_ms", "protocol", "fingerprint",
    "shards_max", "load", "lease_version", "reads_healthy", "draining", "wanted", "streams", "joined_wall_ms", "extra",
)  # fmt: skip
STATUS_COLUMNS: Final = (
    "application", "app_id", "member", "revision", "shard_count", "stalled_count", "millis_behind_latest",
    "records_per_second", "shards", "extra",
)  # fmt: skip
CONTROL_COLUMNS: Final = (
    "application", "app_id", "command", "action", "stream", "generation", "shard", "arguments", "requested_by",
    "requested_wall_ms", "state", "result", "extra",
)  # fmt: skip

_SHARD_DIGITS: Final = 12

_STRINGS = msgspec.json.Decoder(tuple[str, ...])
_OPEN_KEYS = msgspec.json.Decoder(tuple[tuple[str, str, int, str], ...])
_WANTED = msgspec.json.Decoder(tuple[tuple[str, ...], tuple[tuple[int, int, int, int | str], ...]])
_SHARDS = msgspec.json.Decoder(tuple[ShardStatus, ...])
_ARGUMENTS = msgspec.json.Decoder(dict[str, str])
_EXTRA = msgspec.json.Decoder(dict[str, Any])


def _json(value: object) -> str:
    return msgspec.json.encode(value).decode()


# applications
def app_columns(row: AppRow) -> Columns:
    return (row.app, row.app_id, row.created_wall_ms, row.incarnation, row.watch, _json(row.extra))


def app_row(columns: Columns) -> AppRow:
    column = dict(zip(APP_COLUMNS, columns, strict=True))
    return msgspec.convert(column | {"app": column["application"], "extra": _EXTRA.decode(column["extra"])}, AppRow)


# streams
def stream_columns(app: str, app_id: str, row: StreamRow) -> Columns:
    return (
        app, app_id, row.stream_key, row.name, row.arn, row.created_seconds, _start_text(row.origin), row.generation,
        int(row.bootstrapped), row.version, _json(row.extra),
    )  # fmt: skip


def stream_row(columns: Columns) -> StreamRow:
    column = dict(zip(STREAM_COLUMNS, columns, strict=True))
    return msgspec.convert(
        column
        | {
            "stream_key": column["stream"],
            "origin": _start(column["origin"]),
            "bootstrapped": bool(column["bootstrapped"]),
            "version": column["count"],
            "extra": _EXTRA.decode(column["extra"]),
        },
        StreamRow,
    )


# leases
def lease_columns(app: str, app_id: str, row: LeaseRow) -> Columns:
    checkpoint, finish, stopped = row.checkpoint, row.finish, row.stopped
    return (
        app, app_id, row.key.stream_key, row.key.generation, row.key.shard_id, row.owner, row.version,
        _position_text(checkpoint.watermark), int(row.is_finished), row.epoch, _start_text(row.start),
        _json(row.waits_for), _range_text(row.hash_key_range), _position_text(checkpoint.frontier),
        _json([(key.digest.hex(), str(key.first_open), key.attempts, key.state) for key in checkpoint.open_keys]),
        checkpoint.seek_epoch, checkpoint.order, checkpoint.seen_through_seconds,
        finish and finish.reason, _json(finish.children if finish else ()),
        stopped and stopped.reason, stopped and _position_text(stopped.position), stopped and stopped.partition_key,
        stopped and stopped.member_id, stopped and stopped.at_wall_ms,
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


def _stopped(column: Fields) -> Fields | None:
    if column["stopped_reason"] is None:
        return None
    return {
        "reason": column["stopped_reason"],
        "position": _position(column["stopped_position"]),
        "partition_key": column["stopped_partition_key"],
        "member_id": column["stopped_member"],
        "at_wall_ms": column["stopped_wall_ms"],
    }


def _open_keys(text: str) -> list[Fields]:
    return [
        {
            "digest": bytes.fromhex(digest),
            "first_open": Position.parse(first_open),
            "attempts": attempts,
            "state": state,
        }
        for digest, first_open, attempts, state in _OPEN_KEYS.decode(text)
    ]


# members
def member_columns(app: str, app_id: str, row: MemberRow) -> Columns:
    return (
        app, app_id, row.member_id, row.worker_id, row.counter, row.state, row.expiry_ms, row.protocol, row.fingerprint,
        row.shards_max, row.load, row.lease_version, int(row.reads_healthy), int(row.draining),
        _wanted_text(row.wanted), _json(row.streams), row.joined_wall_ms, _json(row.extra),
    )  # fmt: skip


def member_row(columns: Columns) -> MemberRow:
    column = dict(zip(MEMBER_COLUMNS, columns, strict=True))
    return msgspec.convert(
        column
        | {
            "member_id": column["member"],
            "worker_id": column["worker"],
            "reads_healthy": bool(column["reads_healthy"]),
            "draining": bool(column["draining"]),
            "wanted": _wanted(column["wanted"]),
            "streams": _STRINGS.decode(column["streams"]),
            "extra": _EXTRA.decode(column["extra"]),
        },
        MemberRow,
    )


def _wanted_text(wanted: tuple[HandOffRequest, ...]) -> str:
    """Short, because each heartbeat writes it: each name once, and for each request the numbers of requester and
    stream, the generation, and the number of the shard.
    """
    if not wanted:
        return "[]"
    names = {name: 0 for request in wanted for name in (request.requester, request.key.stream_key)}
    names = {name: number for number, name in enumerate(names)}
    requests = [
        (
            names[request.requester],
            names[request.key.stream_key],
            request.key.generation,
            _shard_number(request.key.shard_id),
        )
        for request in wanted
    ]
    return _json((list(names), requests))


def _wanted(text: str) -> list[dict[str, Any]]:
    if text == "[]":
        return []
    names, requests = _WANTED.decode(text)
    return [
        {
            "key": {
                "stream_key": names[stream],
                "generation": generation,
                "shard_id": shard if isinstance(shard, str) else f"shardId-{shard:012d}",
            },
            "requester": names[requester],
        }
        for requester, stream, generation, shard in requests
    ]


def _shard_number(shard_id: str) -> int | str:
    """As Kinesis names shards; any other name as it is."""
    number = shard_id.removeprefix("shardId-")
    is_usual = number != shard_id and len(number) == _SHARD_DIGITS and number.isascii() and number.isdigit()
    return int(number) if is_usual else shard_id


def status_columns(app: str, app_id: str, row: StatusRow) -> Columns:
    return (
        app, app_id, row.member_id, row.revision, row.shard_count, row.stalled_count, row.millis_behind_latest,
        row.records_per_second, _json(row.shards), _json(row.extra),
    )  # fmt: skip


def status_row(columns: Columns) -> StatusRow:
    column = dict(zip(STATUS_COLUMNS, columns, strict=True))
    return msgspec.convert(
        column
        | {
            "member_id": column["member"],
            "shards": _SHARDS.decode(column["shards"]),
            "extra": _EXTRA.decode(column["extra"]),
        },
        StatusRow,
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


# JSON
def encode_row(row: Row) -> bytes:
    """A row as JSON, with the fields of a newer version beside those that this one knows."""
    names, columns = _flat(row)
    fields = dict(zip(names, columns, strict=True))
    extra = _EXTRA.decode(fields.pop("extra"))
    return msgspec.json.encode(extra | {name: value for name, value in fields.items() if name not in _PLACE})


def decode_row(kind: Kind, data: bytes) -> Row:
    """The opposite of `encode_row`. Raises `ValueError` for bytes that are no such row."""
    if kind not in get_args(Kind):
        raise ValueError(f"there is no kind of row {kind!r}; the kinds are {', '.join(get_args(Kind))}")
    names, read = _READERS[kind]
    fields = _EXTRA.decode(data)
    extra = {name: value for name, value in fields.items() if name not in names}
    known = fields | {"extra": _json(extra)}
    missing = [name for name in names if name not in known and name not in _PLACE]
    if missing:
        raise ValueError(f"a row of kind {kind!r} must have the fields {', '.join(missing)}")
    return read(tuple(known.get(name, "") for name in names))


_PLACE: Final = frozenset({"application", "app_id"})
"""In the key of a row, except for the application's own."""


def _flat(row: Row) -> tuple[tuple[str, ...], Columns]:
    match row:
        case AppRow():
            return _APP_NAMES, app_columns(row)
        case StreamRow():
            return STREAM_COLUMNS, stream_columns("", "", row)
        case LeaseRow():
            return LEASE_COLUMNS, lease_columns("", "", row)
        case MemberRow():
            return MEMBER_COLUMNS, member_columns("", "", row)
        case StatusRow():
            return STATUS_COLUMNS, status_columns("", "", row)
        case ControlRow():
            return CONTROL_COLUMNS, control_columns("", "", row)


_APP_NAMES: Final = ("app", "id", *APP_COLUMNS[2:])
_READERS: Final[dict[str, tuple[tuple[str, ...], Callable[[Columns], Row]]]] = {
    "app": (_APP_NAMES, app_row),
    "stream": (STREAM_COLUMNS, stream_row),
    "lease": (LEASE_COLUMNS, lease_row),
    "member": (MEMBER_COLUMNS, member_row),
    "status": (STATUS_COLUMNS, status_row),
    "command": (CONTROL_COLUMNS, control_row),
}
