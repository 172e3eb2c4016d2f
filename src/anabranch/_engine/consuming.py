"""One run of a consumer: a worker in its host task, and the way that records leave it.

Started by `run`, `run_batches`, or the first step of an iteration; ended by `stop`, by reaching its end, or by a
failure that then shows wherever somebody waits.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from typing import Any

from anabranch._core.handling.batches import BatchLimits
from anabranch._core.handling.lanes import LaneLimits
from anabranch._engine.batch_feed import BatchFeed
from anabranch._engine.batch_runners import BatchRunners
from anabranch._engine.calls import HandlerCall
from anabranch._engine.handling import Handling
from anabranch._engine.host import Host
from anabranch._engine.manual_walk import ManualWalk
from anabranch._engine.outside import Outside
from anabranch._engine.record_runners import RecordRunners
from anabranch._engine.sinks import BatchSink, RecordSink, WalkSink
from anabranch._engine.walk import Walk
from anabranch._engine.worker import SinkMaker, Worker
from anabranch._engine.worker_plan import WorkerPlan
from anabranch.budget import Budget
from anabranch.errors import AnabranchError, ConsumerFailedError, UsageError
from anabranch.records import Batch, Record
from anabranch.reports import StopReport

__all__ = ["Consuming", "Handling"]

WALK_SLICE = 500
WALK_LIMITS = BatchLimits(max_records=500, max_bytes=1 << 20, max_wait_ms=0)


class Consuming:
    def __init__(self, outside: Outside, plan: WorkerPlan, handling: Handling, budget: Budget) -> None:
        self._outside = outside
        self._handling = handling
        self.worker = Worker(outside, plan, budget)
        self._plan = plan
        self._host = Host()
        self._walk: Walk | None = None
        self._manual: ManualWalk | None = None
        self._walker: asyncio.Task[Any] | None = None
        self._call: HandlerCall | None = None
        self.on_start: Callable[[], None] = lambda: None

    # starting

    async def start(self, make_sink: SinkMaker) -> None:
        """Returns when the worker has joined, or raises what kept it from it."""
        self.on_start()
        self._host.start(self.worker.run(make_sink), "anabranch consumer")
        try:
            await self.worker.settled.wait()
        except asyncio.CancelledError:
            await self._host.cancel()
            raise
        if not self.worker.has_joined:
            await self._host.wait()
            self._raise_failure()

    def handle_records(self, call: HandlerCall) -> SinkMaker:
        self._call = call
        self.worker.on_leaving = call.give_up

        def make(worker: Worker) -> RecordSink:
            handling = self._handling
            runners = RecordRunners(
                self._outside,
                worker.member,
                worker.scheduler,
                call,
                handling,
                on_finished=worker.on_finished,
                on_failed=worker.on_failed,
            )
            limits = LaneLimits(
                open_keys_max=handling.concurrency + 100,
                replay_bytes_max=self._plan.settings.checkpoints.replay_bytes_max,
            )
            return RecordSink(runners, handling.order, limits, handling.concurrency)

        return make

    def handle_batches(self, call: HandlerCall, limits: BatchLimits) -> SinkMaker:
        self._call = call
        self.worker.on_leaving = call.give_up

        def make(worker: Worker) -> BatchSink:
            handling = self._handling
            feed = BatchFeed(self._outside, worker.member, worker.scheduler, on_finished=worker.on_finished)
            runners = BatchRunners(
                self._outside,
                worker.member,
                feed,
                call,
                handling,
                on_failed=worker.on_failed,
            )
            return BatchSink(runners, feed, limits, handling.concurrency)

        return make

    def walk(self, limits: BatchLimits) -> SinkMaker:
        def make(worker: Worker) -> WalkSink:
            feed = BatchFeed(self._outside, worker.member, worker.scheduler, on_finished=worker.on_finished)
            self._walk = Walk(feed, self._handling.decode, on_failed=worker.on_failed)
            return WalkSink(self._walk, feed, limits)

        return make

    def walk_by_hand(self) -> SinkMaker:
        def make(worker: Worker) -> ManualWalk:
            self._manual = ManualWalk(
                self._outside,
                worker.member,
                self._handling.decode,
                on_finished=worker.on_finished,
                on_failed=worker.on_failed,
            )
            return self._manual

        return make

    # iterating

    async def records(self, *, by_hand: bool = False) -> AsyncIterator[Record[Any]]:
        """One after another. What is acknowledged by hand is not acknowledged by asking for the next."""
        await self.start(self.walk_by_hand() if by_hand else self.walk(WALK_LIMITS))
        walk = self._manual if by_hand else self._walk
        assert walk is not None
        self._walker = asyncio.current_task()
        worker, next_record, left = self.worker, walk.next_record, WALK_SLICE
        while True:
            record = None if worker.is_stopping else next_record()
            if record is not None:
                yield record
                left -= 1
                if not left:
                    left = WALK_SLICE
                    await asyncio.sleep(0)  # a loop's body that never waits still lets the others run
            elif await self._is_over():
                return

    async def batches(self, limits: BatchLimits) -> AsyncIterator[Batch[Any]]:
        await self.start(self.walk(limits))
        walk = self._walk
        assert walk is not None
        self._walker = asyncio.current_task()
        while True:
            batch = None if self.worker.is_stopping else walk.next_batch()
            if batch is not None:
                yield batch
            elif await self._is_over():
                return

    def ack(self, records: Iterable[Record[Any]]) -> None:
        if self._manual is None:
            raise UsageError('ack() goes with Consumer(acknowledge="manual") and `async for`')
        for record in records:
            self._manual.ack(record)

    async def _is_over(self) -> bool:
        """Waits until there may be more; True if there will be none."""
        if self.worker.is_stopping or not self._host.is_running:
            if self._walk is not None:
                self._walk.acknowledge()
                self._walk.settle()  # the stop waits for it
            await self._host.wait()
            self._raise_failure()
            return True
        await self.worker.wait_for_records()
        return False

    # ending

    async def wait(self) -> StopReport:
        """Until the worker has ended."""
        await self._host.wait()
        self._raise_failure()
        return self._report()

    async def stop(self, deadline: float) -> StopReport:
        walk = self._walk
        if walk is not None and self._walker is asyncio.current_task():
            walk.acknowledge()  # called in the loop's body: the record in hand is done
        if self._host.is_running:
            self.worker.stop(self._outside.clock.now_ms() + round(deadline * 1000))
            if self.worker.is_called_by_handler:
                return StopReport(committed=False, released=False)  # yet: the stop waits for this very call
            await self._host.wait()
        self.close()
        self._raise_failure()
        return self._report()

    async def abandon(self, deadline: float) -> None:
        """The loop was left with a record in hand: it is not waited for, and will be handled again."""
        if self._walk is not None:
            self._walk.abandon()
        if self._manual is not None:
            self._manual.abandon()
        await self.stop(deadline)

    async def cancel(self) -> None:
        await self._host.cancel()
        self.close()

    def close(self) -> None:
        if self._call is not None:
            self._call.close()

    @property
    def is_running(self) -> bool:
        return self._host.is_running

    def _report(self) -> StopReport:
        return self.worker.report or StopReport()

    def _raise_failure(self) -> None:
        error = self._host.error
        if error is None:
            return
        if isinstance(error, AnabranchError):
            raise error
        raise ConsumerFailedError(f"the consumer ended in an unexpected {type(error).__name__}: {error}") from error
