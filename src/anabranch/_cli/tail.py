"""`anabranch tail`: the records of a stream as they come, de-aggregated, through splits and merges.

It is a consumer that keeps nothing: it shares no leases and leaves no trace but its reads.
"""

import argparse
import datetime as dt
import sys
from typing import TYPE_CHECKING, Any, Final

from anabranch._cli.aws_options import (
    add_aws_options,
    add_stream_argument,
    aws_from,
    partition_key_argument,
    shard_id_argument,
)
from anabranch._cli.connection import connect
from anabranch._cli.moments import end_argument, start_argument
from anabranch._cli.number_arguments import positive_integer
from anabranch._cli.outcomes import DONE, CommandFailed
from anabranch._cli.record_lines import DEFAULT_FORMAT, FORMAT_HELP, format_argument, json_line, text_line
from anabranch._model.streams import StreamName
from anabranch.errors import ConfigurationError

if TYPE_CHECKING:
    from anabranch._model.shards import Shard
    from anabranch.consumer import Consumer
    from anabranch.records import Record

__all__ = ["add_arguments", "run"]

_EXAMPLES: Final = """\
examples:
  anabranch tail orders
  anabranch tail orders --from -15m --key user-1
  anabranch tail orders --from horizon --no-follow --json > orders.jsonl
  anabranch tail orders --from 2026-01-31T09:30Z --to 2026-01-31T09:45Z
  anabranch tail orders -n 10 --format '%T %k %s'
"""
_BATCH_WAIT_SECONDS: Final = 0.05


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = _EXAMPLES + FORMAT_HELP
    add_stream_argument(parser)
    parser.add_argument(
        "--from", dest="start", type=start_argument, default="latest", metavar="WHEN",
        help="latest (the default: what comes from now on), horizon (all there is), -15m (s, m, h, d, w), or an ISO "
        "time (of this machine's zone unless it names one)",
    )  # fmt: skip
    end = parser.add_mutually_exclusive_group()
    end.add_argument("--to", type=end_argument, metavar="WHEN", help="end there: now, -5m, or an ISO time")
    end.add_argument("--no-follow", action="store_true", help="end when all that is there was read")
    parser.add_argument("-n", dest="count", type=positive_integer, metavar="N", help="end after N records")
    parser.add_argument("--key", type=partition_key_argument, help="only records of this partition key")
    parser.add_argument("--shard", type=shard_id_argument, help="only records of this shard; its number will do")
    shape = parser.add_mutually_exclusive_group()
    shape.add_argument(
        "--format", type=format_argument, metavar="FORMAT", help="a line for each record, as described below"
    )
    shape.add_argument("--json", action="store_true", help="print one JSON object a line, for programs")
    add_aws_options(parser)


def run(arguments: argparse.Namespace) -> int:
    stream: StreamName = arguments.stream
    start, end = arguments.start, arguments.to
    if end is not None and isinstance(start, dt.datetime) and end <= start:
        raise ConfigurationError("--to is not after --from: nothing lies between them")
    if end is not None and start == "latest":
        raise ConfigurationError("--to needs --from, since without it nothing before now is shown: try --from horizon")
    from anabranch.consumer import Consumer

    with connect(arguments, stream) as connection:
        connection.run(connection.summary(stream))  # a stream that is not there is told with those that are
        if arguments.shard is not None:
            _check_shard(arguments, connection.run(connection.shards(stream)))
        consumer: Consumer[bytes] = Consumer(
            str(stream), start=start, until="tip" if arguments.no_follow else end, aws=aws_from(arguments)
        )
        connection.run(_print_all(arguments, consumer))
    return DONE


def _check_shard(arguments: argparse.Namespace, shards: list["Shard"]) -> None:
    found = next((shard for shard in shards if shard.shard_id == arguments.shard), None)
    if found is None:
        raise CommandFailed(
            f"{arguments.stream} has no {arguments.shard}: anabranch shards {arguments.stream} lists them"
        )
    if not found.is_open and arguments.start == "latest":
        raise CommandFailed(f"{found.shard_id} is closed: nothing will come. --from horizon shows what is in it")


async def _print_all(arguments: argparse.Namespace, consumer: "Consumer[bytes]") -> None:
    pieces = arguments.format or format_argument(DEFAULT_FORMAT)
    for_terminal = sys.stdout.isatty()

    def line(record: "Record[Any]") -> str:
        return json_line(record) if arguments.json else text_line(pieces, record, for_terminal=for_terminal)

    left: int | None = arguments.count
    async with consumer:
        async for batch in consumer.batches(max_wait=_BATCH_WAIT_SECONDS):
            wanted = [record for record in batch.records if _is_wanted(record, arguments)][:left]
            sys.stdout.write("".join(f"{line(record)}\n" for record in wanted))
            sys.stdout.flush()  # who reads this from a pipe reads along
            if left is not None:
                left -= len(wanted)
                if not left:
                    return


def _is_wanted(record: "Record[Any]", arguments: argparse.Namespace) -> bool:
    return (arguments.key is None or record.partition_key == arguments.key) and (
        arguments.shard is None or record.shard_id == arguments.shard
    )
