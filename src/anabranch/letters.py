"""A dead letter: one record that could not be handled, why, and its JSON form.

Its idempotency key depends only on the record and the application, so two copies of a letter are recognised as one.
The package `dead_letters` stores letters.
"""

import hashlib
import json
import re
import traceback
from base64 import b64decode, b64encode
from collections.abc import Sequence
from types import FrameType, TracebackType
from typing import Any, Final

import msgspec

from anabranch._model.streams import BEFORE_FIRST_SUB
from anabranch.errors import CodecError, DeadLetterError
from anabranch.records import Record

SCHEMA_VERSION: Final = 1

_FRAMES_MAX: Final = 8  # the innermost frames, which say where it failed
_VARYING_TEXT = re.compile(r"'[^']*'|\"[^\"]*\"|0x[0-9a-fA-F]+|\d+")  # differs between two failures of the same kind


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    """What a handler raised. After failover, the new owner knows only the type and the fingerprint."""

    error_type: str
    message: str = ""
    stack: str = ""
    fingerprint: str

    @classmethod
    def of(cls, error: BaseException) -> "Failure":
        return cls(
            error_type=_type_name(error), message=_message(error), stack=_stack(error), fingerprint=fingerprint(error)
        )


class Letter(msgspec.Struct, frozen=True, kw_only=True):
    """One record that was not handled, and why."""

    idempotency_key: str
    """The same for every copy of this letter."""
    app: str
    stream: str
    stream_created_seconds: float
    shard_id: str
    sequence_number: str
    sub_sequence_number: int = BEFORE_FIRST_SUB
    """The index inside an aggregate; -1 for a plain record."""
    partition_key: str | None = None
    """None if the record was trimmed from the stream before the letter was written."""
    explicit_hash_key: str | None = None
    arrival_seconds: float | None = None
    """When the service received the record, in seconds since 1970."""
    payload: bytes | None = None
    """None if it was trimmed from the stream, redacted, or stored elsewhere (`overflow`)."""
    error_type: str
    message: str = ""
    stack: str = ""
    fingerprint: str
    """The same for failures of the same kind, whatever the record."""
    attempts: int
    """How often the handler was called with the record."""
    attempted_seconds: tuple[float, ...] = ()
    """When those calls started, as far as known: a new owner knows only their number."""
    written_seconds: float
    """When the letter was created."""
    recovered: bool = False
    """Whether a new owner repeated the write, because the last owner crashed before it was done. Such a letter has no
    message and no stack.
    """
    redrive_count: int = 0
    """How many redrives of it have failed."""
    redrives_cut_off: int = 0
    """How many redrives have crashed in its delivery since the last one that failed."""
    overflow: str | None = None
    """The URL of the whole letter, if it was too large for its destination."""
    schema_version: int = SCHEMA_VERSION
    extra: dict[str, Any] | None = None
    """Fields that only a newer version knows. They are kept when the letter is written again."""

    @property
    def place(self) -> str:
        """Names the record in messages: stream, shard and sequence number."""
        return f"{self.stream}/{self.shard_id} {self.position}"

    @property
    def position(self) -> str:
        """The sequence number, with `:` and the index in an aggregate."""
        sub = "" if self.sub_sequence_number == BEFORE_FIRST_SUB else f":{self.sub_sequence_number}"
        return f"{self.sequence_number}{sub}"

    def record(self) -> Record[bytes]:
        """The record as the consumer got it. Raises `DeadLetterError` if the letter has no payload."""
        if self.payload is None:
            raise DeadLetterError(f"the letter of record {self.place} has no payload", code="missing")
        return Record(
            stream=self.stream,
            shard_id=self.shard_id,
            sequence_number=self.sequence_number,
            sub_sequence_number=self.sub_sequence_number,
            partition_key=self.partition_key or self.idempotency_key,
            explicit_hash_key=self.explicit_hash_key,
            arrival_seconds=self.arrival_seconds or 0.0,
            data=self.payload,
            value=self.payload,
        )


def idempotency_key(
    app: str, stream: str, stream_created_seconds: float, shard_id: str, sequence_number: str, sub_sequence_number: int
) -> str:
    """The creation time counts in whole seconds, because some stores and services drop the fraction."""
    parts = [app, stream, int(stream_created_seconds), shard_id, sequence_number, sub_sequence_number]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def make_letter(
    *,
    app: str,
    stream: str,
    stream_created_seconds: float,
    shard_id: str,
    sequence_number: str,
    sub_sequence_number: int,
    record: Record[Any] | None,
    failure: Failure,
    attempts: int,
    attempted_seconds: Sequence[float] = (),
    written_seconds: float,
    recovered: bool = False,
) -> Letter:
    """`record` is None if it was trimmed from the stream."""
    return Letter(
        idempotency_key=idempotency_key(
            app, stream, stream_created_seconds, shard_id, sequence_number, sub_sequence_number
        ),
        app=app,
        stream=stream,
        stream_created_seconds=stream_created_seconds,
        shard_id=shard_id,
        sequence_number=sequence_number,
        sub_sequence_number=sub_sequence_number,
        partition_key=record.partition_key if record else None,
        explicit_hash_key=record.explicit_hash_key if record else None,
        arrival_seconds=record.arrival_seconds if record else None,
        payload=record.data if record else None,
        **msgspec.structs.asdict(failure),
        attempts=attempts,
        attempted_seconds=tuple(attempted_seconds),
        written_seconds=written_seconds,
        recovered=recovered,
    )


def stream_order(letter: Letter) -> str:
    """A sort key: the order of the records in the stream, also across resharding. The sequence numbers of a child shard
    are larger than those of its parents.
    """
    created = int(letter.stream_created_seconds)
    return f"{letter.stream}/{created:012d}/{int(letter.sequence_number):060d}.{letter.sub_sequence_number + 1:09d}"


def fingerprint(error: BaseException) -> str:
    """16 hex digits that are the same for failures of the same kind: of one type, raised by one chain of functions.

    Line numbers change with each release, and messages with each record, so neither counts. An error without frames (it
    came from another process) is identified by its message instead, without the numbers and quotations in it.
    """
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    names = [f"{_module_of(frame)}.{frame.f_code.co_qualname}" for frame in frames]
    functions = [name for name in names if not name.startswith("anabranch.")][-_FRAMES_MAX:]
    identity = functions or [_VARYING_TEXT.sub("#", _message(error))]
    return hashlib.sha256(json.dumps([_type_name(error), *identity]).encode()).hexdigest()[:16]


def _type_name(error: BaseException) -> str:
    kind = type(error)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def _message(error: BaseException) -> str:
    try:
        return valid_text(str(error))
    except Exception:  # noqa: BLE001 -- its __str__ is user code
        return "(its text cannot be shown)"


def _stack(error: BaseException) -> str:
    try:
        return valid_text("".join(traceback.format_exception(type(error), error, handler_traceback(error))))
    except Exception:  # noqa: BLE001 -- it shows causes and notes, which are user code, too
        return ""


def valid_text(text: str) -> str:
    """Escapes lone surrogates: the text of an exception may have some, and they cannot be stored or printed."""
    return text.encode("utf-8", "backslashreplace").decode()


# The JSON form: ASCII, so that every destination accepts it unchanged


def encode_letter(letter: Letter) -> bytes:
    fields: dict[str, Any] = {**(letter.extra or {}), **msgspec.structs.asdict(letter)}
    del fields["extra"]
    fields = {name: valid_text(value) if isinstance(value, str) else value for name, value in fields.items()}
    if letter.payload is not None:
        fields["payload"] = b64encode(letter.payload).decode()
    return json.dumps(fields, separators=(",", ":")).encode("ascii")


def decode_letter(body: bytes | str) -> Letter:
    """Raises CodecError if it is not a letter."""
    try:
        fields = json.loads(body)
        known = {name: fields[name] for name in Letter.__struct_fields__ if name in fields and name != "extra"}
        if known.get("payload") is not None:
            known["payload"] = b64decode(known["payload"], validate=True)
        extra = {name: value for name, value in fields.items() if name not in known}
        letter = msgspec.convert({**known, "extra": extra or None}, Letter)
        int(letter.sequence_number)  # raises if `stream_order` would
        json.dumps(fields, ensure_ascii=False, allow_nan=False).encode()  # raises for NaN, infinity and lone surrogates
    except (ValueError, TypeError, AttributeError, RecursionError, msgspec.ValidationError) as error:
        raise CodecError(f"this is not a dead letter of anabranch: {error}") from error
    return letter


def handler_traceback(error: BaseException) -> TracebackType | None:
    """From the handler on: without our own frames that called it. If there are no others, with all of them."""
    trace = error.__traceback__
    while trace is not None and _module_of(trace.tb_frame).startswith("anabranch."):
        trace = trace.tb_next
    return trace or error.__traceback__


def _module_of(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", "?"))
