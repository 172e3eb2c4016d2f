"""Rows to columns and back.

One column holds one thing, in words that can be read and compared in SQL; the few lists are JSON. Every function
here has its opposite, and reading what was written gives an equal row. What cannot be read (a hand that slipped in
an editor) raises `ValueError`, as msgspec's errors are too; the store reports it with the file's name.
"""

from typing import Any, Final

import msgspec

from anabranch._model.hash_keys import HashKeyRange, parse_hash_key
from anabranch._model.leases import (
    AppRow,
    ControlRow,
    HandOffRequest,
    LeaseRow,
    MemberRow,
    ShardStatus,
    StreamRow,
)
from anabranch._model.sequence_numbers import Position
from anabranch._model.start_positions import StartingPosition, at_timestamp

__all__ = [
    "APP_COLUMNS",
    "CONTROL_COLUMNS",
    "LEASE_COLUMNS",
    "MEMBER_COLUMNS",
    "STREAM_COLUMNS",
    "app_columns",
    "app_row",
    "control_columns",
    "control_row",
    "lease_columns",
    "lease_row",
    "member_columns",
    "member_row",
    "stream_columns",
    "stream_row",
]

Columns = tuple[Any, ...]
Fields = dict[str, Any]

APP_COLUMNS: Final = ("application", "app_id", "created_wall_ms", "incarnation")
STREAM_COLUMNS: Final = (
    "application", "stream", "name", "arn", "created_seconds", "origin", "generation", "bootstrapped", "count",
)  # fmt: skip
LEASE_COLUMNS: Final = (
    "application", "stream", "generation", "shard", "owner", "count", "checkpoint", "completed", "epoch", "starts_at",
    "waits_for", "hash_key_range", "frontier", "open_keys", "seek_epoch", "order_mode", "seen_through_seconds",
    "finish_reason", "children", "stopped_reason", "stopped_position", "stopped_partition_key", "stopped_member",
    "stopped_wall_ms", "paused", "takes_without_progress", "records_handled", "checkpointed_wall_ms",
)  # fmt: skip
MEMBER_COLUMNS: Final = (
    "application", "member", "worker", "counter", "state", "expiry_ms", "protocol", "fingerprint", "generation",
    "shards_max", "load", "lease_version", "reads_healthy", "draining", "wanted", "status", "joined_wall_ms",
)  # fmt: skip
CONTROL_COLUMNS: Final = (
    "application", "command", "action", "stream", "generation", "shard", "arguments", "requested_by",
    "requested_wall_ms", "state", "result",
)  # fmt: skip

_STRINGS = msgspec.json.Decoder(tuple[str, ...])
_OPEN_KEYS = msgspec.json.Decoder(tuple[tuple[str, str, int, str], ...])
_WANTED = msgspec.json.Decoder(tuple[HandOffRequest, ...])
_STATUS = msgspec.json.Decoder(tuple[ShardStatus, ...])
_ARGUMENTS = msgspec.json.Decoder(dict[str, str])


def _json(value: object) -> str:
    return msgspec.json.encode(value).decode()


# applications
def app_columns(row: AppRow) -> Columns:
    return (row.app, row.app_id, row.created_wall_ms, row.incarnation)


def app_row(columns: Columns) -> AppRow:
    app, app_id, created_wall_ms, incarnation = columns
    return msgspec.convert(
        {"app": app, "app_id": app_id, "created_wall_ms": created_wall_ms, "incarnation": incarnation}, AppRow
    )


# streams
def stream_columns(app: str, row: StreamRow) -> Columns:
    return (
        app, row.stream_key, row.name, row.arn, row.created_seconds, _start_text(row.origin), row.generation,
        int(row.bootstrapped), row.version,
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
        },
        StreamRow,
    )


# leases
def lease_columns(app: str, row: LeaseRow) -> Columns:
    checkpoint, finish, stopped = row.checkpoint, row.finish, row.stopped
    return (
        app, row.key.stream_key, row.key.generation, row.key.shard_id, row.owner, row.version,
        _position_text(checkpoint.watermark), int(row.is_finished), row.epoch, _start_text(row.start),
        _json(row.waits_for), _range_text(row.hash_key_range), _position_text(checkpoint.frontier),
        _json([(key.digest.hex(), str(key.first_open), key.attempts, key.state) for key in checkpoint.open_keys]),
        checkpoint.seek_epoch, checkpoint.order, checkpoint.seen_through_seconds,
        finish and finish.reason, _json(finish.children if finish else ()),
        stopped and stopped.reason, stopped and _position_text(stopped.position), stopped and stopped.partition_key,
        stopped and stopped.member_id, stopped and stopped.at_wall_ms,
        int(row.paused), row.takes_without_progress, row.records_handled, row.checkpointed_at_wall_ms,
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
def member_columns(app: str, row: MemberRow) -> Columns:
    return (
        app, row.member_id, row.worker_id, row.counter, row.state, row.expiry_ms, row.protocol, row.fingerprint,
        row.generation, row.shards_max, row.load, row.lease_version, int(row.reads_healthy), int(row.draining),
        _json(row.wanted), _json(row.status), row.joined_wall_ms,
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
            "wanted": _WANTED.decode(column["wanted"]),
            "status": _STATUS.decode(column["status"]),
        },
        MemberRow,
    )


# commands
def control_columns(app: str, row: ControlRow) -> Columns:
    key = row.key
    return (
        app, row.command_id, row.action, key and key.stream_key, key and key.generation, key and key.shard_id,
        _json(row.arguments), row.requested_by, row.requested_wall_ms, row.state, row.result,
    )  # fmt: skip


def control_row(columns: Columns) -> ControlRow:
    column = dict(zip(CONTROL_COLUMNS, columns, strict=True))
    return msgspec.convert(
        column
        | {
            "command_id": column["command"],
            "key": None if column["stream"] is None else _key(column),
            "arguments": _ARGUMENTS.decode(column["arguments"]),
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
