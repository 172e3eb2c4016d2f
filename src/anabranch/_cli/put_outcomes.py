"""How the records of one `anabranch put` ended, shown in the order in which they were given.

Only records that are on their way are held here, and no more of them than a bound.
"""

import asyncio
import sys
import time
from collections import deque
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

import msgspec

from anabranch._cli.output import counted, say
from anabranch._model.sequence_numbers import BEFORE_FIRST_SUB

if TYPE_CHECKING:
    from anabranch._engine.writing.delivery import Delivery
    from anabranch.records import PutResult

__all__ = ["PutOutcomes"]

_OUTSTANDING_MAX: Final = 20_000


class PutDocument(msgspec.Struct, frozen=True, kw_only=True):
    """One record, as --json prints it: one object a line."""

    delivered: bool
    partition_key: str
    shard_id: str | None
    sequence_number: str | None
    sub_sequence_number: int | None
    maybe_written: bool
    error: str | None


class PutOutcomes:
    def __init__(self, *, is_quiet: bool, as_json: bool) -> None:
        self.failed_count = 0
        self._delivered_count = 0
        self._shard_ids: set[str] = set()
        self._is_quiet = is_quiet
        self._as_json = as_json
        self._started = time.monotonic()
        self._waiting: deque[tuple[str, Delivery]] = deque()
        self._arrived = asyncio.Event()

    async def add(self, source: str, delivery: "Delivery") -> None:
        self._waiting.append((source, delivery))
        self._arrived.set()
        if len(self._waiting) >= _OUTSTANDING_MAX:
            await self._waiting[0][1]
            self.show_settled()

    async def follow(self) -> None:
        """Shows what is settled while the next record is still waited for. Never ends by itself."""
        while True:
            await self.settle()
            self._arrived.clear()
            await self._arrived.wait()

    async def settle(self) -> None:
        while self._waiting:
            await self._waiting[0][1]
            self.show_settled()

    def refuse(self, source: str, error: ValueError) -> None:
        self.failed_count += 1
        say(f"{source} was not written: {error}")

    def show_settled(self) -> None:
        for source, result in self._settled():
            if result.delivered:
                self._delivered_count += 1
                self._shard_ids.add(result.shard_id or "")
            else:
                self.failed_count += 1
                maybe = "may have been written, or not" if result.maybe_written else "was not written"
                say(f"{source}, with key {result.partition_key!r}, {maybe}: {result.error}")
            if self._as_json:
                print(msgspec.json.encode(_document(result)).decode())
            elif result.delivered and not self._is_quiet:
                print(f"{result.shard_id}  {_position(result)}  {result.partition_key}")
        sys.stdout.flush()  # who reads this from a pipe reads along

    def summarize(self) -> None:
        seconds = time.monotonic() - self._started
        failed = f", {self.failed_count} failed" if self.failed_count else ""
        written = f"{counted(self._delivered_count, 'record')} written to {counted(len(self._shard_ids), 'shard')}"
        say(f"{written} in {seconds:.1f} s{failed}")

    def _settled(self) -> Iterator[tuple[str, "PutResult"]]:
        while self._waiting and self._waiting[0][1].done():
            source, delivery = self._waiting.popleft()
            yield source, delivery.result()


def _document(result: "PutResult") -> PutDocument:
    sub = result.sub_sequence_number
    return PutDocument(
        delivered=result.delivered,
        partition_key=result.partition_key,
        shard_id=result.shard_id,
        sequence_number=result.sequence_number,
        sub_sequence_number=None if sub == BEFORE_FIRST_SUB else sub,
        maybe_written=result.maybe_written,
        error=result.error,
    )


def _position(result: "PutResult") -> str:
    sub = result.sub_sequence_number
    return f"{result.sequence_number}" if sub == BEFORE_FIRST_SUB else f"{result.sequence_number}:{sub}"
