"""Records as lines: by a format like kcat's, or as JSON, one object a line.

What goes to a terminal is made harmless there: control characters, of which a record's data may have any, are shown as
escapes. What is piped is left as it is.
"""

import argparse
import re
from base64 import b64encode
from collections.abc import Callable
from typing import Any, Final

import msgspec

from anabranch._cli.moments import timestamp
from anabranch._model.sequence_numbers import BEFORE_FIRST_SUB
from anabranch.records import Record

__all__ = ["DEFAULT_FORMAT", "FORMAT_HELP", "RecordDocument", "format_argument", "json_line", "text_line"]

Formatter = Callable[[Record[bytes]], str]

DEFAULT_FORMAT: Final = r"%T  %p  %k  %s"
FORMAT_HELP: Final = rf"""
in --format (default: '{DEFAULT_FORMAT}'):
  %s  data as text      %S  its size in bytes   %b  data in base64
  %k  partition key     %n  sequence number, with :place in an aggregate
  %p  shard             %T  time of arrival     %e  the same, in ms since 1970
  %t  stream            %%  a percent sign      \t  tab     \n  line break
"""
_FIELDS: Final[dict[str, Formatter]] = {
    "%": lambda _: "%",
    "T": lambda record: timestamp(record.arrival_seconds),
    "S": lambda record: str(len(record.data)),
    "b": lambda record: b64encode(record.data).decode(),
    "e": lambda record: str(round(record.arrival_seconds * 1000)),
    "k": lambda record: record.partition_key,
    "n": lambda record: str(record.position),
    "p": lambda record: record.shard_id,
    "s": lambda record: record.data.decode(errors="backslashreplace"),
    "t": lambda record: record.stream,
}
_ESCAPES: Final = {"\\n": "\n", "\\t": "\t", "\\\\": "\\"}
_PIECE = re.compile(r"%(.?)|(\\[nt\\])", re.DOTALL)
_CONTROL = re.compile(r"[\x00-\x08\x0a-\x1f\x7f-\x9f]")


class RecordDocument(msgspec.Struct, frozen=True, kw_only=True):
    """A record as --json prints it."""

    stream: str
    shard_id: str
    sequence_number: str
    sub_sequence_number: int | None
    partition_key: str
    explicit_hash_key: str | None
    approximate_arrival_timestamp: str
    data: str | None
    """None where it is not UTF-8."""
    data_base64: str | None
    """None where `data` says it."""


def format_argument(text: str) -> list[str | Formatter]:
    """The pieces of a format: text as it is, and functions of a record."""
    pieces: list[str | Formatter] = []
    end = 0
    for found in _PIECE.finditer(text):
        pieces.append(text[end : found.start()])
        end = found.end()
        if found[2] is not None:
            pieces.append(_ESCAPES[found[2]])
        elif found[1] in _FIELDS:
            pieces.append(_FIELDS[found[1]])
        else:
            known = " ".join(f"%{letter}" for letter in sorted(_FIELDS, key=str.lower))
            raise argparse.ArgumentTypeError(f"{found[0]!r} stands for nothing; there are {known}")
    return [piece for piece in [*pieces, text[end:]] if piece]


def text_line(pieces: list[str | Formatter], record: Record[Any], *, for_terminal: bool) -> str:
    if not for_terminal:
        return "".join(piece if isinstance(piece, str) else piece(record) for piece in pieces)
    return "".join(piece if isinstance(piece, str) else _harmless(piece(record)) for piece in pieces)


def json_line(record: Record[Any]) -> str:
    try:
        text, encoded = record.data.decode(), None
    except UnicodeDecodeError:
        text, encoded = None, b64encode(record.data).decode()
    sub = record.sub_sequence_number
    document = RecordDocument(
        stream=record.stream,
        shard_id=record.shard_id,
        sequence_number=record.sequence_number,
        sub_sequence_number=None if sub == BEFORE_FIRST_SUB else sub,
        partition_key=record.partition_key,
        explicit_hash_key=record.explicit_hash_key,
        approximate_arrival_timestamp=timestamp(record.arrival_seconds),
        data=text,
        data_base64=encoded,
    )
    return msgspec.json.encode(document).decode()


def _harmless(text: str) -> str:
    return _CONTROL.sub(lambda found: repr(found[0])[1:-1], text)
