"""Rows as flat fields, and as JSON for stores that keep bytes.

The fields are made to be read by people: `owner` is a member, `count` grows with every write, `checkpoint` is the
position up to which all records are handled. SQLite has a column for each; the few lists are JSON. What a newer version
added is not among them: a store keeps a row's `extra` beside its fields.
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
)
from anabranch._model.streams import Position, StartingPosition, at_timestamp
from anabranch.reasons import parse_reason
from anabranch.stores.row_store import KINDS, Kind, Row

Columns = tuple[Any, ...]
Fields = dict[str, Any]


class RowCodec(NamedTuple):
    row_type: type[Row]
    columns: tuple[str, ...]
    flatten: Callable[[Any], Columns]
    """The values of a row's columns."""
    unflatten: Callable[[Fields], Fields]
    """From the columns, the fields of the row that are stored in another form or under another name."""

    def fields(self, row: Row) -> Fields:
        return dict(zip(self.columns, self.flatten(row), strict=True))

    def row(self, fields: Fields, extra: Fields) -> Any:
        """Raises `ValueError` if they are not the fields of a row."""
        try:
            return msgspec.convert(fields | self.unflatten(fields) | {"extra": extra}, self.row_type)
        except (AttributeError, TypeError) as error:
            raise ValueError(f"a field has a value of another type: {error}") from error


class _StoredOpenKey(msgspec.Struct, array_like=True):
    digest: str
    first_open: str
    attempts: int
    state: str
    error_type: str = ""
    fingerprint: str = ""


_STRINGS = msgspec.json.Decoder(tuple[str, ...])
_OPEN_KEYS = msgspec.json.Decoder(tuple[_StoredOpenKey, ...])
_SHARDS = msgspec.json.Decoder(tuple[list[Any], ...])
_ARGUMENTS = msgspec.json.Decoder(dict[str, str])
_OBJECT = msgspec.json.Decoder(dict[str, Any])


def _json(value: object) -> str:
    return msgspec.json.encode(value).decode()


# applications
_APP_COLUMNS: Final = ("app", "id", "created_wall_ms", "incarnation", "watch", "place", "other_store")


def _app_columns(row: AppRow) -> Columns:
    return row.app, row.app_id, row.created_wall_ms, row.incarnation, row.watch, row.place, row.other_store


def _app_fields(column: Fields) -> Fields:
    return {"app_id": column["id"]}


# streams
_STREAM_COLUMNS: Final = (
    "stream", "name", "arn", "created_seconds", "origin", "generation", "bootstrapped",
    "consumer_name", "consumer_arn", "consumer_state", "count",
)  # fmt: skip


def _stream_columns(row: StreamRow) -> Columns:
    fanout = row.fanout
    return (
        row.stream_key, row.name, row.arn, row.created_seconds, _start_text(row.origin), row.generation,
        int(row.bootstrapped), fanout and fanout.name, fanout and fanout.arn, fanout and fanout.state, row.version,
    )  # fmt: skip


def _stream_fields(column: Fields) -> Fields:
    name, arn, state = (column[f"consumer_{part}"] for part in ("name", "arn", "state"))
    return {
        "stream_key": column["stream"],
        "origin": _start(column["origin"]),
        "bootstrapped": bool(column["bootstrapped"]),
        "fanout": None if state is None else {"name": name, "arn": arn, "state": state},
        "version": column["count"],
    }


# leases
_LEASE_COLUMNS: Final = (
    "stream", "generation", "shard", "owner", "count", "checkpoint", "completed", "epoch",
    "starts_at", "waits_for", "hash_key_range", "frontier", "open_keys", "seek_epoch", "order_mode",
    "seen_through_seconds", "finish_reason", "children", "stopped_reason", "stopped_position", "stopped_partition_key",
    "stopped_member", "stopped_wall_ms", "paused", "takes_without_progress", "records_handled", "checkpointed_wall_ms",
)  # fmt: skip


def _lease_columns(row: LeaseRow) -> Columns:
    checkpoint, finish, stopped = row.checkpoint, row.finish, row.stopped
    return (
        row.key.stream_key, row.key.generation, row.key.shard_id, row.owner, row.version,
        _position_text(checkpoint.watermark), int(row.is_finished), row.epoch, _start_text(row.start),
        _json(row.waits_for), _range_text(row.hash_key_range), _position_text(checkpoint.frontier),
        _json([_stored_open_key(key) for key in checkpoint.open_keys]),
        checkpoint.seek_epoch, checkpoint.order, checkpoint.seen_through_seconds,
        finish and finish.reason, _json(finish.children if finish else ()),
        stopped and _json(stopped.reason), stopped and _position_text(stopped.position),
        stopped and stopped.partition_key, stopped and stopped.member_id, stopped and stopped.at_wall_ms,
        int(row.paused), row.takes_without_progress, row.records_handled, row.checkpointed_at_wall_ms,
    )  # fmt: skip


def _lease_fields(column: Fields) -> Fields:
    return {
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
        "finish": _finish(column) if column["completed"] else None,
        "stopped": _stopped(column),
        "paused": bool(column["paused"]),
        "checkpointed_at_wall_ms": column["checkpointed_wall_ms"],
    }


def _key(column: Fields) -> Fields:
    return {"stream_key": column["stream"], "generation": column["generation"], "shard_id": column["shard"]}


def _finish(column: Fields) -> Fields:
    return {"reason": column["finish_reason"], "children": _STRINGS.decode(column["children"])}


def _stopped(column: Fields) -> Stopped | None:
    if column["stopped_reason"] is None:
        return None
    names = ("stopped_partition_key", "stopped_member", "stopped_wall_ms")
    partition_key, member_id, at_wall_ms = msgspec.convert(
        [column[name] for name in names], tuple[str | None, str, int]
    )
    reason, position = msgspec.json.decode(column["stopped_reason"]), _position(column["stopped_position"])
    return Stopped(parse_reason(reason), position, partition_key, member_id, at_wall_ms)


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
_MEMBER_COLUMNS: Final = (
    "member", "counter", "state", "expiry_ms", "protocol", "order_mode", "streams", "shards_max", "load",
    "change_count", "changed", "reads_healthy", "draining", "wanted", "joined_wall_ms",
)  # fmt: skip


def _member_columns(row: MemberRow) -> Columns:
    return (
        row.member_id, row.counter, row.state, row.expiry_ms, row.protocol, row.order, " ".join(row.streams),
        row.shards_max, row.load, row.change_count, " ".join(row.changed), int(row.reads_healthy), int(row.draining),
        " ".join(row.wanted), row.joined_wall_ms,
    )  # fmt: skip


def _member_fields(column: Fields) -> Fields:
    return {
        "member_id": column["member"],
        "order": column["order_mode"],
        "streams": column["streams"].split(),
        "changed": column["changed"].split(),
        "reads_healthy": bool(column["reads_healthy"]),
        "draining": bool(column["draining"]),
        "wanted": column["wanted"].split(),
    }


_STATUS_COLUMNS: Final = (
    "member", "revision", "shard_count", "stalled_count", "millis_behind_latest", "records_per_second", "shards",
)  # fmt: skip


def _status_columns(row: StatusRow) -> Columns:
    return (
        row.member_id, row.revision, row.shard_count, row.stalled_count, row.millis_behind_latest,
        row.records_per_second, shards_json(row.shards),
    )  # fmt: skip


def _status_fields(column: Fields) -> Fields:
    shards = [_shard_status(*stored) for stored in _SHARDS.decode(column["shards"])]
    return {"member_id": column["member"], "shards": shards}


def _shard_status(lease: object, reason: object = None, *rest: object) -> ShardStatus:
    """This version may not know the reason."""
    status = msgspec.convert([lease, None, *rest], ShardStatus)
    return status if reason is None else msgspec.structs.replace(status, reason=parse_reason(reason))


# commands
_CONTROL_COLUMNS: Final = (
    "command", "action", "stream", "generation", "shard", "arguments", "requested_by", "requested_wall_ms", "state",
    "result",
)  # fmt: skip


def _control_columns(row: ControlRow) -> Columns:
    key = row.key
    return (
        row.command_id, row.action, key and key.stream_key, key and key.generation, key and key.shard_id,
        _json(row.arguments), row.requested_by, row.requested_wall_ms, row.state, row.result,
    )  # fmt: skip


def _control_fields(column: Fields) -> Fields:
    return {
        "command_id": column["command"],
        "key": None if column["stream"] is None else _key(column),
        "arguments": _ARGUMENTS.decode(column["arguments"]),
    }


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


CODECS: Final[dict[Kind, RowCodec]] = {
    "app": RowCodec(AppRow, _APP_COLUMNS, _app_columns, _app_fields),
    "stream": RowCodec(StreamRow, _STREAM_COLUMNS, _stream_columns, _stream_fields),
    "lease": RowCodec(LeaseRow, _LEASE_COLUMNS, _lease_columns, _lease_fields),
    "member": RowCodec(MemberRow, _MEMBER_COLUMNS, _member_columns, _member_fields),
    "status": RowCodec(StatusRow, _STATUS_COLUMNS, _status_columns, _status_fields),
    "command": RowCodec(ControlRow, _CONTROL_COLUMNS, _control_columns, _control_fields),
}


# JSON
def encode_row(row: Row) -> bytes:
    """A row as JSON, with the fields of a newer version beside those that this one knows."""
    return msgspec.json.encode(row.extra | CODECS[KINDS[type(row)]].fields(row))


def decode_row(kind: Kind, data: bytes) -> Row:
    """The opposite of `encode_row`. Raises `ValueError` if the bytes are not a row of that kind."""
    if kind not in CODECS:
        raise ValueError(f"unknown kind of row {kind!r}; the kinds are {', '.join(get_args(Kind))}")
    codec = CODECS[kind]
    fields = _OBJECT.decode(data)
    if missing := [name for name in codec.columns if name not in fields]:
        raise ValueError(f"a row of kind {kind!r} must have the fields {', '.join(missing)}")
    extra = {name: value for name, value in fields.items() if name not in codec.columns}
    return cast("Row", codec.row(fields, extra))
