"""Rows as flat fields, and as JSON for stores that keep bytes.

The fields are made to be read by people: `owner` is a member, `count` grows with every write, `checkpoint` is the
position up to which all records are handled. SQLite has a column for each; the few lists are JSON. Fields that a newer
version added are in a row's `extra`: a store keeps them beside these.
"""

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any, Final, cast, get_args

import msgspec

from anabranch._core.leases.status import shards_json
from anabranch._model.hash_keys import HashKeyRange, parse_hash_key
from anabranch._model.leases import (
    AppRow,
    ControlRow,
    LeaseKey,
    LeaseRow,
    MemberRow,
    OpenKey,
    ShardStatus,
    StatusRow,
    Stopped,
    StreamRow,
)
from anabranch._model.streams import TRIM_HORIZON, Position, StartingPosition, at_timestamp
from anabranch.reasons import Reason, parse_reason
from anabranch.stores.row_store import KINDS, Kind, Row

Fields = dict[str, Any]


class RowCodec:
    """The fields of the rows of one kind."""

    def __init__(self, example: Row, fields: Callable[[Any], Fields], parse: Callable[[Fields], Fields]) -> None:
        """`fields` returns the stored fields of a row. `parse` does the reverse for those that are stored in another
        form or under another name. `example` is a row with the defaults.
        """
        self.fields = fields
        self.defaults = fields(example)
        self.columns = tuple(self.defaults)
        self._row_type = type(example)
        self._parse = parse

    def row(self, fields: Fields, extra: Fields) -> Any:
        """Raises `ValueError` if they are not the fields of a row."""
        try:
            return msgspec.convert(fields | self._parse(fields) | {"extra": extra}, self._row_type)
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
def _app_fields(row: AppRow) -> Fields:
    return {
        "app": row.app, "id": row.app_id, "created_wall_ms": row.created_wall_ms, "incarnation": row.incarnation,
        "watch": row.watch, "place": row.place, "other_store": row.other_store,
    }  # fmt: skip


def _parse_app(column: Fields) -> Fields:
    return {"app_id": column["id"]}


# streams
def _stream_fields(row: StreamRow) -> Fields:
    fanout = row.fanout
    return {
        "stream": row.stream_key, "name": row.name, "arn": row.arn, "created_seconds": row.created_seconds,
        "origin": _start_text(row.origin), "generation": row.generation, "bootstrapped": int(row.bootstrapped),
        "consumer_name": fanout and fanout.name, "consumer_arn": fanout and fanout.arn,
        "consumer_state": fanout and fanout.state, "count": row.version,
    }  # fmt: skip


def _parse_stream(column: Fields) -> Fields:
    name, arn, state = (column[f"consumer_{part}"] for part in ("name", "arn", "state"))
    return {
        "stream_key": column["stream"],
        "origin": _start(column["origin"]),
        "bootstrapped": bool(column["bootstrapped"]),
        "fanout": None if state is None else {"name": name, "arn": arn, "state": state},
        "version": column["count"],
    }


# leases
def _lease_fields(row: LeaseRow) -> Fields:
    checkpoint, finish, stopped = row.checkpoint, row.finish, row.stopped
    return {
        "stream": row.key.stream_key, "generation": row.key.generation, "shard": row.key.shard_id,
        "owner": row.owner, "count": row.version, "checkpoint": _position_text(checkpoint.watermark),
        "completed": int(row.is_finished), "epoch": row.epoch, "starts_at": _start_text(row.start),
        "waits_for": _json(row.waits_for), "hash_key_range": _range_text(row.hash_key_range),
        "frontier": _position_text(checkpoint.frontier),
        "open_keys": _json([_stored_open_key(key) for key in checkpoint.open_keys]),
        "seek_epoch": checkpoint.seek_epoch, "order_mode": checkpoint.order,
        "seen_through_seconds": checkpoint.seen_through_seconds,
        "finish_reason": finish and finish.reason, "children": _json(finish.children if finish else ()),
        "stopped_reason": stopped and _json(stopped.reason),
        "stopped_position": stopped and _position_text(stopped.position),
        "stopped_partition_key": stopped and stopped.partition_key, "stopped_member": stopped and stopped.member_id,
        "stopped_wall_ms": stopped and stopped.at_wall_ms, "paused": int(row.paused),
        "takes_without_progress": row.takes_without_progress, "records_handled": row.records_handled,
        "checkpointed_wall_ms": row.checkpointed_at_wall_ms,
    }  # fmt: skip


def _parse_lease(column: Fields) -> Fields:
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
        "finish": {"reason": column["finish_reason"], "children": _STRINGS.decode(column["children"])}
        if column["completed"]
        else None,
        "stopped": _stopped(column),
        "paused": bool(column["paused"]),
        "checkpointed_at_wall_ms": column["checkpointed_wall_ms"],
    }


def _key(column: Fields) -> Fields:
    return {"stream_key": column["stream"], "generation": column["generation"], "shard_id": column["shard"]}


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
def _member_fields(row: MemberRow) -> Fields:
    return {
        "member": row.member_id, "counter": row.counter, "state": row.state, "expiry_ms": row.expiry_ms,
        "protocol": row.protocol, "order_mode": row.order, "streams": " ".join(row.streams),
        "shards_max": row.shards_max, "load": row.load, "change_count": row.change_count,
        "changed": " ".join(row.changed), "reads_healthy": int(row.reads_healthy), "draining": int(row.draining),
        "wanted": " ".join(row.wanted), "joined_wall_ms": row.joined_wall_ms,
    }  # fmt: skip


def _parse_member(column: Fields) -> Fields:
    return {
        "member_id": column["member"],
        "order": column["order_mode"],
        "streams": column["streams"].split(),
        "changed": column["changed"].split(),
        "reads_healthy": bool(column["reads_healthy"]),
        "draining": bool(column["draining"]),
        "wanted": column["wanted"].split(),
    }


def _status_fields(row: StatusRow) -> Fields:
    return {
        "member": row.member_id, "revision": row.revision, "shard_count": row.shard_count,
        "stalled_count": row.stalled_count, "millis_behind_latest": row.millis_behind_latest,
        "records_per_second": row.records_per_second, "shards": shards_json(row.shards),
    }  # fmt: skip


def _parse_status(column: Fields) -> Fields:
    shards = [_shard_status(*stored) for stored in _SHARDS.decode(column["shards"])]
    return {"member_id": column["member"], "shards": shards}


def _shard_status(lease: object, reason: object = None, *rest: object) -> ShardStatus:
    """Parses the reason separately, because this version may not know it."""
    status = msgspec.convert([lease, None, *rest], ShardStatus)
    return status if reason is None else msgspec.structs.replace(status, reason=parse_reason(reason))


# commands
def _control_fields(row: ControlRow) -> Fields:
    key = row.key
    return {
        "command": row.command_id, "action": row.action, "stream": key and key.stream_key,
        "generation": key and key.generation, "shard": key and key.shard_id, "arguments": _json(row.arguments),
        "requested_by": row.requested_by, "requested_wall_ms": row.requested_wall_ms, "state": row.state,
        "result": row.result,
    }  # fmt: skip


def _parse_control(column: Fields) -> Fields:
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


_EPOCH: Final = datetime.fromtimestamp(0, UTC)


def timestamp(wall_ms: int) -> str:
    """For people: `2026-01-31T12:00:00.000Z`."""
    return (_EPOCH + timedelta(milliseconds=wall_ms)).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def parse_timestamp(text: str) -> int:
    """The inverse of `timestamp`."""
    return (datetime.fromisoformat(text) - _EPOCH) // timedelta(milliseconds=1)


CODECS: Final[dict[Kind, RowCodec]] = {
    "app": RowCodec(AppRow(app="", app_id="", created_wall_ms=-1), _app_fields, _parse_app),
    "stream": RowCodec(
        StreamRow(stream_key="", name="", arn="", created_seconds=0.0, origin=TRIM_HORIZON),
        _stream_fields,
        _parse_stream,
    ),
    "lease": RowCodec(LeaseRow(key=LeaseKey("", 0, "")), _lease_fields, _parse_lease),
    "member": RowCodec(MemberRow(member_id="", expiry_ms=0, protocol=""), _member_fields, _parse_member),
    "status": RowCodec(StatusRow(member_id="", revision=0), _status_fields, _parse_status),
    "command": RowCodec(ControlRow(command_id="", action=""), _control_fields, _parse_control),
}


# JSON
_ADDED: Final = ("consumer_name", "consumer_arn", "consumer_state")
"""Rows of earlier versions do not have these."""


def encode_row(row: Row) -> bytes:
    """A row as JSON, with the fields of a newer version beside those that this one knows."""
    return msgspec.json.encode(row.extra | CODECS[KINDS[type(row)]].fields(row))


def decode_row(kind: Kind, data: bytes) -> Row:
    """The inverse of `encode_row`. Raises `ValueError` if the bytes are not a row of that kind."""
    if kind not in CODECS:
        raise ValueError(f"unknown kind of row {kind!r}; the kinds are {', '.join(get_args(Kind))}")
    codec = CODECS[kind]
    stored = _OBJECT.decode(data)
    fields = dict.fromkeys(_ADDED) | stored
    if missing := [name for name in codec.columns if name not in fields]:
        raise ValueError(f"a row of kind {kind!r} must have the fields {', '.join(missing)}")
    extra = {name: value for name, value in stored.items() if name not in codec.columns}
    return cast("Row", codec.row(fields, extra))
