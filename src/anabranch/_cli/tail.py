"""`anabranch tail`: shows the records of a stream as they arrive, in a format like kcat's or as JSON lines."""

import argparse
import datetime as dt
import re
import sys
from base64 import b64encode
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from anabranch._cli.connection import connect
from anabranch._cli.options import (
    add_aws_options,
    add_stream_argument,
    aws_from,
    end_argument,
    partition_key_argument,
    positive_integer,
    shard_id_argument,
    start_argument,
    timestamp,
)
from anabranch._cli.output import CommandFailed, clean, json_text, show_lines
from anabranch._model.streams import BEFORE_FIRST_SUB, StreamName
from anabranch.errors import ConfigurationError
from anabranch.records import Record

if TYPE_CHECKING:
    from anabranch._model.streams import Shard
    from anabranch.consumer import Consumer


Formatter = Callable[[Record[bytes]], str]

DEFAULT_FORMAT: Final = r"%T  %p  %k  %s"
FORMAT_HELP: Final = rf"""
in --format (default: '{DEFAULT_FORMAT}'):
  %s  data as text      %S  its size in bytes   %b  data in base64
  %k  partition key     %n  sequence number, with :index in an aggregate
  %p  shard             %T  arrival time        %e  the same, in ms since 1970
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


def format_argument(text: str) -> list[str | Formatter]:
    """A format's parts: literal text, and functions of a record."""
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
            raise argparse.ArgumentTypeError(f"{found[0]!r} is not a placeholder; use {known}")
    return [piece for piece in [*pieces, text[end:]] if piece]


def text_line(pieces: list[str | Formatter], record: Record[Any], *, for_terminal: bool) -> str:
    safe = clean if for_terminal else str
    return "".join(piece if isinstance(piece, str) else safe(piece(record)) for piece in pieces)


def json_line(record: Record[Any]) -> str:
    """`data` is null if it is not UTF-8; then `data_base64` has it."""
    try:
        text, encoded = record.data.decode(), None
    except UnicodeDecodeError:
        text, encoded = None, b64encode(record.data).decode()
    sub = record.sub_sequence_number
    document = {
        "stream": record.stream,
        "shard_id": record.shard_id,
        "sequence_number": record.sequence_number,
        "sub_sequence_number": None if sub == BEFORE_FIRST_SUB else sub,
        "partition_key": record.partition_key,
        "explicit_hash_key": record.explicit_hash_key,
        "approximate_arrival_timestamp": timestamp(record.arrival_seconds),
        "data": text,
        "data_base64": encoded,
    }
    return json_text(document)


_EXAMPLES: Final = """\
examples:
  anabranch tail orders
  anabranch tail orders --from -15m --key user-1
  anabranch tail orders --from horizon --no-follow --json > orders.jsonl
  anabranch tail orders --from 2026-01-31T09:30Z --to 2026-01-31T09:45Z
  anabranch tail orders -n 10 --format '%T %k %s'
  anabranch tail orders --fanout
"""
_BATCH_WAIT_SECONDS: Final = 0.05


def add_tail(parser: argparse.ArgumentParser) -> None:
    parser.epilog = _EXAMPLES + FORMAT_HELP
    parser.set_defaults(work=_run)
    add_stream_argument(parser)
    parser.add_argument(
        "--from", dest="start", type=start_argument, default="latest", metavar="WHEN",
        help="latest (default: new records), horizon (everything), -15m (s, m, h, d, w), or an ISO "
        "time (local time unless it names a zone)",
    )  # fmt: skip
    end = parser.add_mutually_exclusive_group()
    end.add_argument("--to", type=end_argument, metavar="WHEN", help="stop at this time: now, -5m, or an ISO time")
    end.add_argument("--no-follow", action="store_true", help="stop when all present records are read")
    parser.add_argument("-n", dest="count", type=positive_integer, metavar="N", help="stop after N records")
    parser.add_argument("--key", type=partition_key_argument, help="only records of this partition key")
    parser.add_argument("--shard", type=shard_id_argument, help="only records of this shard (id or number)")
    fanout = "read with enhanced fan-out, through a consumer registered for this run"
    parser.add_argument("--fanout", action="store_true", help=fanout)
    shape = parser.add_mutually_exclusive_group()
    shape.add_argument("--format", type=format_argument, metavar="FORMAT", help="format of each line, see below")
    shape.add_argument("--json", action="store_true", help="print one JSON object per line")
    add_aws_options(parser)


def _run(arguments: argparse.Namespace) -> None:
    stream: StreamName = arguments.stream
    start, end = arguments.start, arguments.to
    if end is not None and isinstance(start, dt.datetime) and end <= start:
        raise ConfigurationError("--to must be after --from")
    if end is not None and start == "latest":
        raise ConfigurationError("--to needs --from: try --from horizon")
    from anabranch.consumer import Consumer

    with connect(arguments, stream) as connection:
        connection.run(connection.summary(stream))  # a missing stream is reported with those that exist
        if arguments.shard is not None:
            _check_shard(arguments, connection.run(connection.shards(stream)))
        consumer: Consumer[bytes] = Consumer(
            str(stream),
            start=start,
            until="tip" if arguments.no_follow else end,
            read="fanout" if arguments.fanout else "polling",
            aws=aws_from(arguments),
        )
        connection.run(_print_all(arguments, consumer))


def _check_shard(arguments: argparse.Namespace, shards: list["Shard"]) -> None:
    found = next((shard for shard in shards if shard.shard_id == arguments.shard), None)
    if found is None:
        advice = f"anabranch shards {arguments.stream} lists them"
        raise CommandFailed(f"{arguments.stream} has no {arguments.shard}: {advice}")
    if not found.is_open and arguments.start == "latest":
        raise CommandFailed(f"{found.shard_id} is closed and gets no new records; --from horizon shows its records")


async def _print_all(arguments: argparse.Namespace, consumer: "Consumer[bytes]") -> None:
    pieces = arguments.format or format_argument(DEFAULT_FORMAT)
    for_terminal = sys.stdout is not None and sys.stdout.isatty()

    def line(record: Record[Any]) -> str:
        return json_line(record) if arguments.json else text_line(pieces, record, for_terminal=for_terminal)

    left: int | None = arguments.count
    async with consumer:
        async for batch in consumer.batches(max_wait=_BATCH_WAIT_SECONDS):
            wanted = [
                record
                for record in batch.records
                if arguments.key in {None, record.partition_key} and arguments.shard in {None, record.shard_id}
            ][:left]
            show_lines(line(record) for record in wanted)
            if left is not None:
                left -= len(wanted)
                if not left:
                    return
