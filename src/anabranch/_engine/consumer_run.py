"""One run of a consumer: a worker in a background task, and how records leave it.

`run`, `run_batches` or the first step of an iteration starts it. `stop`, its own end, or a failure ends it; a failure
is raised wherever the caller waits.
"""

import asyncio
import sys
import weakref
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from msgspec.structs import replace

from anabranch._core.handling.batches import BatchLimits
from anabranch._core.handling.lanes import LaneLimits
from anabranch._engine.handler_calls import HandlerCall, HandlerOptions
from anabranch._engine.iteration import Iteration, ManualIterator, RecordIterator
from anabranch._engine.ports import Ports
from anabranch._engine.ready_sessions import BatchFeed
from anabranch._engine.runners import BatchRunners, RecordRunners
from anabranch._engine.sinks import BatchSink, IteratorSink, RecordSink
from anabranch._engine.tasks import BackgroundTask, attach_failure
from anabranch._engine.worker import SinkMaker, Worker, WorkerPlan
from anabranch.budget import Budget
from anabranch.errors import AnabranchError, ConsumerFailedError, ShardStoppedError, UsageError
from anabranch.events import ConsumerFailed
from anabranch.records import Batch, Record
from anabranch.reports import StopReport

T = TypeVar("T")

CANCEL_GRACE_MS = 2_000
"""After the run was cancelled: how long calls may take to end."""
PARKED_KEYS_MAX = 100
"""Keys that may wait for a retry, besides those that run (rule M1)."""
ITERATION_LIMITS = BatchLimits(max_records=500, max_bytes=1 << 20, max_wait_ms=0)


class ConsumerRun:
    def __init__(self, ports: Ports, plan: WorkerPlan, options: HandlerOptions, budget: Budget) -> None:
        self._ports = ports
        self._options = options
        self.worker = Worker(ports, plan, budget)
        self._plan = plan
        self._host = BackgroundTask()
        self._iterator: RecordIterator | None = None
        self._manual: ManualIterator | None = None
        self._iterating_task: asyncio.Task[Any] | None = None
        """The task of the caller's loop."""
        self._iteration: Callable[[], Iteration[Any] | None] = lambda: None
        self._abandoned: tuple[Record[bytes], ...] = ()
        self._call: HandlerCall | None = None
        self._interrupt: Callable[[], None] = lambda: None
        self._failure_is_seen = False
        self.on_start: Callable[[], None] = lambda: None

    # starting

    async def start(self, make_sink: SinkMaker) -> None:
        """Returns when the worker has joined, or raises why it could not."""
        self._launch(make_sink)
        try:
            await self._joined()
        except asyncio.CancelledError:
            await self.cancel()
            raise

    def _launch(self, make_sink: SinkMaker) -> None:
        self.on_start()
        self._host.start(self.worker.run(make_sink), "anabranch consumer")

    async def _joined(self) -> None:
        await self.worker.start_finished.wait()
        if not self.worker.has_joined:
            await self._host.wait()
            self._raise_failure()

    def handle_records(self, call: HandlerCall) -> SinkMaker:
        self._call = call
        self.worker.on_leaving = self._give_up

        def make(worker: Worker) -> RecordSink:
            options = self._options
            runners = RecordRunners(
                self._ports,
                worker.fleet,
                worker.scheduler,
                call,
                options,
                finishes_at_end=self._plan.settings.at_shard_end == "finish",
                on_finished=worker.on_finished,
                on_failed=worker.on_failed,
                on_undecodable=worker.on_undecodable,
            )
            limits = LaneLimits(
                open_keys_max=options.concurrency + PARKED_KEYS_MAX,
                replay_bytes_max=self._plan.settings.checkpoints.replay_bytes_max,
            )
            self._interrupt = runners.interrupt
            at_once = min(options.concurrency, call.concurrency_max or options.concurrency)
            return RecordSink(runners, options.order, limits, at_once)

        return make

    def handle_batches(self, call: HandlerCall, limits: BatchLimits) -> SinkMaker:
        self._call = call
        self.worker.on_leaving = self._give_up

        def make(worker: Worker) -> BatchSink:
            options = self._options
            feed = BatchFeed(self._ports, worker.fleet, worker.scheduler, on_finished=worker.on_finished)
            runners = BatchRunners(
                self._ports,
                worker.fleet,
                feed,
                call,
                options,
                finishes_at_end=self._plan.settings.at_shard_end == "finish",
                on_failed=worker.on_failed,
                on_undecodable=worker.on_undecodable,
            )
            self._interrupt = runners.interrupt
            return BatchSink(runners, feed, limits, options.concurrency)

        return make

    def iterate(self, limits: BatchLimits) -> SinkMaker:
        self.worker.on_leaving = self._tell_in_hand

        def make(worker: Worker) -> IteratorSink:
            feed = BatchFeed(self._ports, worker.fleet, worker.scheduler, on_finished=worker.on_finished)
            self._iterator = RecordIterator(feed, self._options, on_undecodable=worker.on_undecodable)
            return IteratorSink(self._iterator, feed, limits)

        return make

    def iterate_manual_ack(self) -> SinkMaker:
        self.worker.on_leaving = self._tell_in_hand

        def make(worker: Worker) -> ManualIterator:
            self._manual = ManualIterator(
                self._ports,
                worker.fleet,
                self._options.decode,
                on_finished=worker.on_finished,
                on_undecodable=worker.on_undecodable,
            )
            return self._manual

        return make

    # iterating

    def records(self, *, manual_ack: bool = False) -> Iteration[Record[Any]]:
        """With `manual_ack`, asking for the next record does not acknowledge the last one."""
        if manual_ack:
            return self._make_iteration(
                self.iterate_manual_ack(), lambda: self._made(self._manual).next_record, tasks_share=True
            )
        # Finished records are reported per slice, so a slice is not longer than what triggers a commit.
        limits = replace(
            ITERATION_LIMITS, max_records=min(ITERATION_LIMITS.max_records, self._plan.settings.checkpoints.records)
        )
        return self._make_iteration(self.iterate(limits), lambda: self._made(self._iterator).next_record)

    def batches(self, limits: BatchLimits) -> Iteration[Batch[Any]]:
        return self._make_iteration(self.iterate(limits), lambda: self._made(self._iterator).next_batch)

    def _make_iteration(
        self, make_sink: SinkMaker, find_next: Callable[[], Callable[[], T | None]], *, tasks_share: bool = False
    ) -> Iteration[T]:
        async def begin() -> Callable[[], T | None]:
            if not self._host.is_started:
                self._launch(make_sink)
            await self._joined()
            self._iterating_task = asyncio.current_task()
            for iterate in (self._iterator, self._manual):
                if iterate is not None:
                    iterate.task = self._iterating_task
            return find_next()

        iteration = Iteration(begin, self._is_over, tasks_share=tasks_share)
        self._iteration = weakref.ref(iteration)
        return iteration

    @staticmethod
    def _made(iterate: T | None) -> T:
        assert iterate is not None, "a worker makes its sink before it joins"
        return iterate

    def ack(self, records: Iterable[Record[Any]]) -> None:
        if self._manual is None:
            raise UsageError('ack() needs Consumer(acknowledge="manual") and `async for`')
        for record in records:
            self._manual.ack(record)

    async def _is_over(self) -> bool:
        """Waits until there may be more records. Returns True if there will be none."""
        iterate = self._iterator or self._manual
        if iterate is not None and iterate.wants_turn:
            iterate.wants_turn = False
            await asyncio.sleep(0)
            return False
        if self.worker.is_stopping or not self._host.is_running:
            if self._iterator is not None:
                self._iterator.acknowledge()
                self._iterator.settle()  # the stop waits for this record
            await self._host.wait()
            self._raise_outcome()
            return True
        await self.worker.wait_for_records()
        return False

    # ending

    async def wait(self) -> StopReport:
        """Waits until the worker has ended."""
        await self._host.wait()
        self._raise_outcome()
        return self._report()

    async def stop(self, deadline: float) -> StopReport:
        """Can be called from any event loop."""
        if not await self._stop(deadline):
            return StopReport(committed=False, released=False)
        self._raise_failure()
        return self._report()

    async def _stop(self, deadline: float) -> bool:
        """Returns False if a handler called it: the stop waits for that call, so it cannot wait for the stop."""
        if self._host.is_running:
            self._host.call(lambda: self._begin_stop(deadline))
            if self._is_called_by_handler:
                return False
            await self._host.wait()
        elif self._host.is_here:
            self._settle_current()
        if self._host.is_here:
            self.close()
        return True

    def _begin_stop(self, deadline: float) -> None:
        self._settle_current()
        if self._host.is_running:
            self.worker.stop(self._ports.clock.now_ms() + round(deadline * 1000))

    @property
    def _is_called_by_handler(self) -> bool:
        return self.worker.is_called_by_handler or (self._call is not None and self._call.runs_in_this_thread)

    def _settle_current(self) -> None:
        """Decides about the record in the caller's loop. If the loop body calls stop(), the record is finished. If the
        loop was left, or handles an error, it is not. In any other case the stop waits for it.
        """
        iterate, iteration = self._iterator, self._iteration()
        if iterate is None:
            return
        was_left = iteration is None or iteration.closed
        in_body = not was_left and self._iterating_task is asyncio.current_task()
        if in_body and sys.exception() is None:
            iterate.acknowledge()
        elif in_body or was_left:
            self._abandon(iterate)

    def _abandon(self, iterate: RecordIterator) -> None:
        in_hand = iterate.in_hand
        if in_hand is not None:
            self._abandoned = (in_hand[1],)
        iterate.abandon()

    async def leave(self, error: BaseException | None, deadline: float) -> None:
        """The end of `async with Consumer`. Does not wait for a record in the caller's loop; it will be handled again.
        If an error leaves the block, it carries the consumer's own error.
        """
        if not (self._host.is_running or self._has_failed_unseen):
            return
        if self._iterator is not None:
            self._abandon(self._iterator)
        if self._manual is not None:
            self._manual.abandon()
        await self._stop(deadline)
        if error is None:
            self._raise_outcome()
        else:
            self._attach_failure(error)

    async def stop_after_cancel(self, cancelled: asyncio.CancelledError) -> None:
        """The task that waits for the run was cancelled: cancels the calls, commits, and frees the leases, so that
        nobody has to wait for their expiry. A second cancellation ends it at once.
        """
        try:
            if self._host.is_running and self.worker.has_joined:
                self.worker.stop(self._ports.clock.now_ms() + CANCEL_GRACE_MS)
                self._interrupt()
                await self._host.wait()
        finally:
            await self.cancel()
        self._attach_failure(cancelled)

    async def cancel(self) -> None:
        """Ends at once, without a commit. Does not wait for calls that cannot be cancelled."""
        if self._call is not None:
            self._call.give_up()
        await self._host.cancel()
        self.close()

    def _give_up(self) -> None:
        """Stops waiting for calls. In a thread they run on, beside those of the next owner (rule L11)."""
        assert self._call is not None
        if not self._call.is_cancellable:
            self.worker.fence_watch.report_running()
        self._call.give_up()

    def _tell_in_hand(self) -> None:
        """Stops waiting for the caller's loop, which cannot be cancelled (rule L11)."""
        self.worker.fence_watch.report_running()

    def close(self) -> None:
        if self._call is not None:
            self._call.close()

    @property
    def is_running(self) -> bool:
        return self._host.is_running

    @property
    def _has_failed_unseen(self) -> bool:
        return not self._failure_is_seen and self._bad_outcome() is not None

    def _report(self) -> StopReport:
        report = self.worker.report or StopReport()
        return replace(report, leftovers=(*report.leftovers, *self._abandoned))

    def _raise_failure(self) -> None:
        self._raise(self._failure())

    def _raise_outcome(self) -> None:
        """For callers that wait for the end."""
        self._raise(self._bad_outcome())

    def _raise(self, error: AnabranchError | None) -> None:
        if error is not None:
            self._failure_is_seen = True
            raise error

    def _failure(self) -> AnabranchError | None:
        error = self._host.error
        if error is None or isinstance(error, AnabranchError):
            return error
        failure = ConsumerFailedError(f"the consumer failed with an unexpected {type(error).__name__}: {error}")
        failure.__cause__ = error
        return failure

    def _bad_outcome(self) -> AnabranchError | None:
        """The failure, or the error of a run that ended by itself with a stopped shard (rule D12)."""
        failure, worker, report = self._failure(), self.worker, self._report()
        if failure is not None or worker.end_reason is None or not report.stopped:
            return failure
        first, *others = report.stopped
        more = f" ({len(others)} more in error.report.stopped)" if others else ""
        stopped = ShardStoppedError(
            f"the run ended because {worker.end_reason}, but not all records were handled: {first}{more}. Fix the "
            "cause and start again: a new run retries the record",
            report=report,
        )
        stopped.__cause__ = first.error
        return stopped

    def _attach_failure(self, error: BaseException) -> None:
        """Another error is raised: it must not hide the consumer's own (P7). An event reports that too, because few
        look at the notes of a cancellation.
        """
        failure = self._bad_outcome()
        if failure is None or self._failure_is_seen:
            return
        self._failure_is_seen = True
        self._ports.emit(ConsumerFailed(error=f"{type(failure).__name__}: {failure}", leaving=type(error).__name__))
        attach_failure(failure, error)
