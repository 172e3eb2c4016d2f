"""`anabranch put`: writes one record, or one for each line of standard input, and says where each of them went.

Lines go out as they come, aggregated, in order for each key. A line that cannot be a record, and a record that was not
delivered, is named on standard error; the others are written all the same, and the exit code is 1.
"""

import argparse
import asyncio
import logging
import os
import sys
import time
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import msgspec

from anabranch._cli.aws_options import (
    add_aws_options,
    add_stream_argument,
    aws_from,
    hash_key_argument,
    partition_key_argument,
)
from anabranch._cli.connection import connect
from anabranch._cli.input_lines import input_lines
from anabranch._cli.number_arguments import bounded_number
from anabranch._cli.outcomes import DONE, FAILED
from anabranch._cli.output import say
from anabranch._cli.put_outcomes import PutOutcomes
from anabranch._model.hash_keys import check_partition_key
from anabranch._model.streams import StreamName
from anabranch.errors import DeliveryFailed

if TYPE_CHECKING:
    from anabranch.producer import Producer

__all__ = ["add_arguments", "run"]

_EXAMPLES: Final = """\
examples:
  anabranch put orders 'hello' --key user-1
  anabranch put orders --key-field user_id < orders.jsonl
  tail -f app.log | anabranch put logs - --key "$HOSTNAME" --rate 500 --quiet

Prints a line for each record: shard, sequence number (and the place inside
an aggregate), partition key. Exit code 1 if a record was not delivered.
"""
_INTERRUPTED_SECONDS: Final = 5.0  # for what was already read when Ctrl-C came


@dataclass(frozen=True, slots=True)
class _Input:
    """One record to be."""

    source: str
    """What to call it in an error."""
    partition_key: str
    data: bytes


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = _EXAMPLES
    add_stream_argument(parser)
    parser.add_argument(
        "data", nargs="?", default="-", metavar="DATA",
        help="the record; - (the default) takes each line of standard input as one",
    )  # fmt: skip
    key = parser.add_mutually_exclusive_group(required=True)
    key.add_argument("--key", type=partition_key_argument, metavar="KEY", help="partition key of every record")
    key.add_argument(
        "--key-field",
        metavar="NAME",
        help="records are JSON, and this field (or a.b: inner field) is the key",
    )
    parser.add_argument(
        "--explicit-hash-key", type=hash_key_argument, metavar="N", help="decides the shard instead of the key"
    )
    parser.add_argument(
        "--rate",
        type=bounded_number("number of records a second", 0.001, 100_000),
        metavar="N",
        help="at most this many records a second",
    )
    parser.add_argument("--no-aggregate", action="store_true", help="one Kinesis record for each of ours")
    parser.add_argument("--quiet", action="store_true", help="print only what failed, and the sum")
    parser.add_argument("--json", action="store_true", help="print one JSON object a line, for programs")
    add_aws_options(parser)


def run(arguments: argparse.Namespace) -> int:
    from anabranch.producer import Producer

    # Every record that fails is named below, with its line: the library's own warnings would say it twice.
    logging.getLogger("anabranch").addHandler(logging.NullHandler())
    stream: StreamName = arguments.stream
    with connect(arguments, stream) as connection:
        connection.run(connection.summary(stream))  # a stream that is not there is told before anything is read
        outcomes = PutOutcomes(is_quiet=arguments.quiet, as_json=arguments.json)
        producer: Producer[bytes] = Producer(
            str(stream), aggregate=None if arguments.no_aggregate else "shard", aws=aws_from(arguments)
        )
        try:
            connection.run(_put_all(arguments, producer, outcomes))
        except KeyboardInterrupt:
            outcomes.summarize()
            raise
        outcomes.summarize()
    return FAILED if outcomes.failed_count else DONE


async def _put_all(arguments: argparse.Namespace, producer: "Producer[bytes]", outcomes: PutOutcomes) -> None:
    explicit = None if arguments.explicit_hash_key is None else str(arguments.explicit_hash_key)
    pace = _Pace(arguments.rate)
    try:
        async with producer, asyncio.TaskGroup() as tasks:
            follower = tasks.create_task(outcomes.follow())
            try:
                async for given in _inputs(arguments):
                    await pace.wait()
                    await _put(producer, given, arguments.key_field, explicit, outcomes)
                await outcomes.settle()
            except asyncio.CancelledError:
                with suppress(DeliveryFailed):  # each is shown by itself
                    await producer.close(deadline=_INTERRUPTED_SECONDS)
                outcomes.show_settled()
                raise
            finally:
                follower.cancel()
    except BaseExceptionGroup as group:  # what went wrong is one thing, in one of the two
        raise group.exceptions[0] from None


async def _put(
    producer: "Producer[bytes]",
    given: _Input,
    key_field: str,
    explicit_hash_key: str | None,
    outcomes: PutOutcomes,
) -> None:
    try:
        key = given.partition_key or _key_in(given.data, key_field)
        delivery = await producer.put(given.data, key, explicit_hash_key=explicit_hash_key)
    except ValueError as error:  # of the line or of its key; also what no stream would take
        outcomes.refuse(given.source, error)
    else:
        await outcomes.add(given.source, delivery)


async def _inputs(arguments: argparse.Namespace) -> AsyncIterator[_Input]:
    key: str = arguments.key or ""
    if arguments.data != "-":
        yield _Input("the record", key, os.fsencode(arguments.data))
        return
    if sys.stdin.isatty():
        say("one record a line; Ctrl-D ends")
    number = 0
    async for line in input_lines(sys.stdin.fileno()):
        number += 1
        if line:
            yield _Input(f"line {number}", key, line)


def _key_in(data: bytes, path: str) -> str:
    """The value of a field, as text. ValueError where the line has none that could be a key."""
    try:
        value: Any = msgspec.json.decode(data)
    except msgspec.DecodeError as error:
        raise ValueError(f"not JSON: {error}") from None
    for name in path.split("."):
        if not isinstance(value, dict) or name not in value:
            raise ValueError(f"it has no field {path!r}")
        value = value[name]
    if value is None or isinstance(value, dict | list):
        raise ValueError(f"its field {path!r} is no text or number")
    return check_partition_key(value if isinstance(value, str) else msgspec.json.encode(value).decode())


class _Pace:
    def __init__(self, rate: float | None) -> None:
        self._interval = None if rate is None else 1 / rate
        self._next = time.monotonic()

    async def wait(self) -> None:
        if self._interval is None:
            return
        now = time.monotonic()
        self._next = max(self._next, now - 1.0)  # what was not used up is kept for a second, no longer
        if self._next > now:
            await asyncio.sleep(self._next - now)
        self._next += self._interval
