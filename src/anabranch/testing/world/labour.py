"""What a simulated process does with its records, told to the journal: when it starts, when it is done, when it fails.

By itself it only pretends: it takes a while, fails some attempts and then succeeds, and sometimes takes far too long
and does not listen when it is told to end.
"""

import asyncio
import contextvars
from collections.abc import Awaitable, Sequence
from typing import Any
from zlib import crc32

from msgspec.structs import replace

from anabranch.budget import Budget
from anabranch.records import Batch, Context, Record
from anabranch.testing.journal import BytesMeasured, CallAbandoned, CallFinished, CallStarted, RecordCall
from anabranch.testing.world.options import OVERRUN_SECONDS_MAX
from anabranch.testing.world.processes import SimulatedProcess
from anabranch.testing.world.surroundings import Surroundings

__all__ = ["Labour", "PretendedError"]

_WAS_PAUSED: contextvars.ContextVar[bool] = contextvars.ContextVar("was_paused", default=False)


class PretendedError(Exception):
    """A handler failed, as handlers do."""


class Labour:
    def __init__(self, process: SimulatedProcess, around: Surroundings, budget: Budget) -> None:
        self._process = process
        self._around = around
        self._network = around.network
        self._journal = around.journal
        self._options = around.options
        self._random = around.random
        self._budget = budget
        self._batch_count = 0
        self.tokens: dict[str, int] = {}
        """The fence tokens of the shards that this process holds."""

    # what handlers are called with

    async def handle(self, record: Record[Any], context: Context) -> None:
        given = self._around.handling.handler
        body = self._pretend([record], context.attempt) if given is None else given(record, context)
        await self._end(self._start([record], context.fence_token), body)

    async def handle_batch(self, batch: Batch[Any], context: Context) -> None:
        body = self._pretend(batch.records, context.attempt)
        await self._end(self._start(batch.records, context.fence_token), body)

    async def walk(self, records: Sequence[Record[Any]]) -> None:
        """The body of a loop."""
        await self.work(records, self.begin(records))

    def begin(self, records: Sequence[Record[Any]]) -> list[RecordCall]:
        """Starts what `work` goes on with."""
        return self._start(records, self.tokens[records[0].shard_id])

    async def work(self, records: Sequence[Record[Any]], calls: list[RecordCall]) -> None:
        await self._end(calls, self._try(records))

    async def retry_store_call(self, records: Sequence[Record[Any]], calls: list[RecordCall]) -> None:
        """Who has taken records into hand tries again without asking anybody: to the engine that is one call."""
        await self._end(calls, self._try_until_done(records))

    async def _try_until_done(self, records: Sequence[Record[Any]]) -> None:
        while True:
            try:
                return await self._try(records)
            except PretendedError:
                """Again."""

    async def _try(self, records: Sequence[Record[Any]]) -> None:
        # Leaving a loop by an error ends the process: that happens once or twice to a record, and to few.
        data = records[0].data
        tries = self._around.tries
        tried = tries[data] = tries.get(data, 0) + 1
        await self._pretend(records, tried if crc32(data) % 7 == 0 else tried + 2)

    async def before_call(self) -> None:
        if not self._network.is_calm and self._random.random() < self._options.gaps:
            _WAS_PAUSED.set(True)
            self._process.pause(self._random.uniform(1, 25))
            await asyncio.sleep(0)

    def decode(self, data: bytes) -> bytes:
        if not self._network.is_calm and crc32(data) % 1000 / 1000 < self._options.undecodable:
            raise PretendedError("for the simulation")
        return data

    # the journal

    def _start(self, records: Sequence[Record[Any]], fence_token: int) -> list[RecordCall]:
        was_paused = _WAS_PAUSED.get()
        _WAS_PAUSED.set(False)
        self._batch_count += 1
        batch = self._batch_count if len(records) > 1 else 0
        calls = [self._call(record, fence_token, was_paused=was_paused, batch=batch) for record in records]
        for call in calls:
            self._journal.tell(CallStarted(call))
        self._measure()
        return calls

    async def _end(self, calls: list[RecordCall], body: Awaitable[Any]) -> None:
        try:
            await body
        except BaseException:
            for call in calls:
                self._journal.tell(CallAbandoned(replace(call, at_ms=self._process.world_ms())))
            raise
        for call in calls:
            self._journal.tell(CallFinished(replace(call, at_ms=self._process.world_ms())))
        self._measure()

    def _call(self, record: Record[Any], fence_token: int, *, was_paused: bool, batch: int) -> RecordCall:
        return RecordCall(
            self._process.world_ms(),
            self._process.name,
            self._around.stream.place(record.shard_id, record.position.sequence_number),
            record.position,
            record.partition_key,
            fence_token,
            was_paused,
            batch,
        )

    def _measure(self) -> None:
        budget = self._budget
        now_ms, name = self._process.world_ms(), self._process.name
        self._journal.tell(BytesMeasured(now_ms, name, budget.used_bytes, budget.limit_bytes))
        self._journal.tell(BytesMeasured(now_ms, name, budget.peak_bytes, budget.limit_bytes))

    # pretending

    async def _pretend(self, records: Sequence[Record[Any]], attempt: int) -> None:
        """Which attempts fail is a property of the record: it is the same wherever and whenever it is tried."""
        options, longest = self._options, self._options.handler_seconds_max
        seconds = self._random.uniform(-longest / 2, longest)  # a third of the calls do not wait at all
        mark = crc32(records[0].data)
        dice = mark % 1000 / 1000
        if dice < options.failing and attempt <= 1 + mark // 1000 % 2:
            await self._take(seconds / 2)
            raise PretendedError("for the simulation")
        if options.failing <= dice < options.failing + options.overrunning and attempt == 1:
            await self._overrun()
        else:
            await self._take(seconds)

    async def _take(self, seconds: float) -> None:
        if seconds > 0:
            await self._sleep(seconds)

    async def _overrun(self) -> None:
        """Takes long, and goes on for a while when it is cancelled; then it has either done its work, or not."""
        until = self._random.uniform(2, OVERRUN_SECONDS_MAX)
        try:
            await self._sleep(until)
        except asyncio.CancelledError:
            if self._network.is_closed:
                raise
            await self._sleep(self._random.uniform(0, 3))
            if self._random.random() < 0.5:
                raise

    async def _sleep(self, seconds: float) -> None:
        clock = self._process.clock
        await clock.sleep_until_ms(clock.now_ms() + int(seconds * 1000))
