"""`anabranch put`: writes one record, or one for each line of standard input."""

import argparse
import asyncio
import logging
import os
import sys
import time
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

import msgspec

from anabranch._cli.connection import connect
from anabranch._cli.options import (
    add_aws_options,
    add_stream_argument,
    aws_from,
    bounded_number,
    hash_key_argument,
    partition_key_argument,
)
from anabranch._cli.output import DONE, FAILED, counted, flush, json_text, say, show
from anabranch._daemon_threads import DaemonThreads
from anabranch._model.hash_keys import check_partition_key
from anabranch._model.streams import BEFORE_FIRST_SUB, StreamName
from anabranch.errors import ConfigurationError, DeliveryFailed
from anabranch.limits import RECORD_BYTES_MAX

if TYPE_CHECKING:
    from anabranch._engine.writing.writer import Delivery
    from anabranch.producer import Producer
    from anabranch.records import PutResult


_CHUNK_BYTES: Final = 1 << 16
_PENDING_MAX: Final = 20_000


async def input_lines(descriptor: int) -> AsyncIterator[bytes]:
    """Yields lines without their line ends. A thread reads, because standard input may block."""
    loop, thread = asyncio.get_running_loop(), DaemonThreads(1, "anabranch-input")
    rest = bytearray()
    while chunk := await loop.run_in_executor(thread, _read, descriptor):
        first, *others = chunk.split(b"\n")
        rest += first
        if others:
            yield bytes(rest).removesuffix(b"\r")
            for line in others[:-1]:
                yield line.removesuffix(b"\r")
            rest = bytearray(others[-1])
        if len(rest) > RECORD_BYTES_MAX:
            raise ConfigurationError(f"a line of standard input is longer than {RECORD_BYTES_MAX} bytes")
    if rest:
        yield bytes(rest)


def _read(descriptor: int) -> bytes:
    try:
        return os.read(descriptor, _CHUNK_BYTES)
    except OSError:  # the terminal is gone
        return b""


class PutOutcomes:
    """Prints and counts the outcomes, in the order of the input."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.pending: asyncio.Queue[tuple[str, Delivery] | None] = asyncio.Queue(_PENDING_MAX)
        """The name and the delivery of each record; None after the last."""
        self.failed_count = 0
        self._delivered_count = 0
        self._shard_ids: set[str] = set()
        self._arguments = arguments
        self._started = time.monotonic()

    def add_invalid(self, source: str, error: ValueError) -> None:
        self.failed_count += 1
        say(f"{source} was not written: {error}")

    async def print_all(self) -> None:
        while (pending := await self.pending.get()) is not None:
            source, delivery = pending
            if not delivery.done():
                flush()  # Python buffers output to a pipe
            self._print(source, await delivery)
            if self.pending.empty():
                flush()

    def _print(self, source: str, result: "PutResult") -> None:
        if result.delivered:
            self._delivered_count += 1
            self._shard_ids.add(result.shard_id or "")
        else:
            self.failed_count += 1
            outcome = "may or may not have been written" if result.maybe_written else "was not written"
            say(f"{source}, with partition key {result.partition_key!r}, {outcome}: {result.error}")
        if self._arguments.json:
            show(json_text(_document(result)))
        elif result.delivered and not self._arguments.quiet:
            show(f"{result.shard_id}  {_position(result)}  {result.partition_key}")

    def summarize(self) -> None:
        seconds = time.monotonic() - self._started
        failed = f", {self.failed_count} failed" if self.failed_count else ""
        written = f"{counted(self._delivered_count, 'record')} written to {counted(len(self._shard_ids), 'shard')}"
        say(f"{written} in {seconds:.1f} s{failed}")


def _document(result: "PutResult") -> dict[str, Any]:
    sub = result.sub_sequence_number
    return {
        "delivered": result.delivered,
        "partition_key": result.partition_key,
        "shard_id": result.shard_id,
        "sequence_number": result.sequence_number,
        "sub_sequence_number": None if sub == BEFORE_FIRST_SUB else sub,
        "maybe_written": result.maybe_written,
        "error": result.error,
    }


def _position(result: "PutResult") -> str:
    sub = result.sub_sequence_number
    return f"{result.sequence_number}" if sub == BEFORE_FIRST_SUB else f"{result.sequence_number}:{sub}"


_EXAMPLES: Final = """\
examples:
  anabranch put orders 'hello' --key user-1
  anabranch put orders --key-field user_id < orders.jsonl
  tail -f app.log | anabranch put logs - --key "$HOSTNAME" --rate 500 --quiet

Prints a line for each record: shard, sequence number (and the sub-sequence
number inside an aggregate), partition key. The exit code is 1 if a record was
not delivered.
"""
_INTERRUPT_DEADLINE_SECONDS: Final = 5.0
"""How long Ctrl-C waits for the records that were already read."""


def add_put(parser: argparse.ArgumentParser) -> None:
    parser.epilog = _EXAMPLES
    parser.set_defaults(work=_run)
    add_stream_argument(parser)
    data = "the record; - (the default) writes each line of standard input as a record"
    parser.add_argument("data", nargs="?", default="-", metavar="DATA", help=data)
    key = parser.add_mutually_exclusive_group(required=True)
    key.add_argument("--key", type=partition_key_argument, metavar="KEY", help="the partition key of all records")
    field = "the records are JSON, and this field is the partition key (a.b for a nested field)"
    key.add_argument("--key-field", metavar="NAME", help=field)
    hash_key = "hash key that selects the shard, instead of the partition key"
    parser.add_argument("--explicit-hash-key", type=hash_key_argument, metavar="N", help=hash_key)
    rate = bounded_number("number of records per second", 0.001, 100_000)
    parser.add_argument("--rate", type=rate, metavar="N", help="at most this many records per second")
    parser.add_argument("--no-aggregate", action="store_true", help="do not aggregate records")
    parser.add_argument("--quiet", action="store_true", help="print only failures and the total")
    parser.add_argument("--json", action="store_true", help="print one JSON object per line")
    add_aws_options(parser)


def _run(arguments: argparse.Namespace) -> int:
    from anabranch.producer import Producer

    # Failed records are printed with their line numbers; the library's warnings would repeat them.
    logging.getLogger("anabranch").addHandler(logging.NullHandler())
    stream: StreamName = arguments.stream
    with connect(arguments, stream) as connection:
        connection.run(connection.summary(stream))  # a missing stream is reported before input is read
        outcomes = PutOutcomes(arguments)
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
    pace = _Pace(arguments.rate)
    try:
        async with producer, asyncio.TaskGroup() as tasks:
            printer = tasks.create_task(outcomes.print_all())
            try:
                async for source, data in _inputs(arguments.data):
                    await pace.wait()
                    await _put(producer, data, source, arguments, outcomes)
            except asyncio.CancelledError:
                with suppress(DeliveryFailed):  # each failure is printed
                    await producer.close(deadline=_INTERRUPT_DEADLINE_SECONDS)
                raise
            finally:
                if not printer.done():  # it ends early if standard output is closed or full
                    await outcomes.pending.put(None)
                    await printer
    except BaseExceptionGroup as group:  # from the task group; only one task fails
        raise group.exceptions[0] from None


async def _put(
    producer: "Producer[bytes]", data: bytes, source: str, arguments: argparse.Namespace, outcomes: PutOutcomes
) -> None:
    explicit_hash_key = None if arguments.explicit_hash_key is None else str(arguments.explicit_hash_key)
    try:
        key = arguments.key or _key_from(data, arguments.key_field)
        delivery = await producer.put(data, key, explicit_hash_key=explicit_hash_key)
    except ValueError as error:  # not JSON, no valid key, or a record that no stream accepts
        outcomes.add_invalid(source, error)
    else:
        await outcomes.pending.put((source, delivery))


async def _inputs(given: str) -> AsyncIterator[tuple[str, bytes]]:
    """Yields each record with its name in error messages, such as `line 7`."""
    if given != "-":
        yield "the record", os.fsencode(given)
        return
    if sys.stdin is None:
        raise ConfigurationError("standard input is closed: pass the record as DATA")
    if sys.stdin.isatty():
        say("one record per line; Ctrl-D ends the input")
    number = 0
    async for line in input_lines(sys.stdin.fileno()):
        number += 1
        if line:
            yield f"line {number}", line


def _key_from(data: bytes, path: str) -> str:
    """The value of a field as text. Raises ValueError if it cannot be a key."""
    try:
        value: Any = msgspec.json.decode(data)
    except msgspec.DecodeError as error:
        raise ValueError(f"not JSON: {error}") from None
    for name in path.split("."):
        if not isinstance(value, dict) or name not in value:
            raise ValueError(f"it has no field {path!r}")
        value = value[name]
    if value is None or isinstance(value, dict | list):
        raise ValueError(f"its field {path!r} is neither text nor a number")
    return check_partition_key(value if isinstance(value, str) else msgspec.json.encode(value).decode())


class _Pace:
    """Spaces records evenly for --rate."""

    def __init__(self, rate: float | None) -> None:
        self._interval = None if rate is None else 1 / rate
        self._next = time.monotonic()

    async def wait(self) -> None:
        if self._interval is None:
            return
        now = time.monotonic()
        self._next = max(self._next, now - 1.0)  # after a pause, catch up by at most one second's records
        if self._next > now:
            await asyncio.sleep(self._next - now)
        self._next += self._interval
