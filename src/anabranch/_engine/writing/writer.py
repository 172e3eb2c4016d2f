"""The producer at work: one task that performs what the pipelines of its streams decide.

observe, plan, perform, apply: a step asks each pipeline for its calls, starts them in the host's task group and settles
what has ended. The host takes a step when something was put and when a time has come; every answer takes one by itself,
so that who awaits it waits no longer than it takes. There is one timer, and none while nothing is on its way.
"""

import asyncio
import inspect
from collections.abc import Callable, Coroutine
from typing import Any

import msgspec

from anabranch._core.writing.aggregation import Bundle, cost_of
from anabranch._core.writing.collection import Call
from anabranch._core.writing.failures import Failures
from anabranch._core.writing.pipeline import Pipeline, WritingRules
from anabranch._engine.clock import Alarm
from anabranch._engine.tasks import BackgroundTask, single_cause
from anabranch._engine.writing.delivery import Delivery
from anabranch._engine.writing.intake import Intake, WrittenStream, failure_of
from anabranch._engine.writing.process_exit import tell_at_exit, tell_no_more
from anabranch._engine.writing.sender import list_stream, send
from anabranch._model.entropy import Entropy
from anabranch._ports.clock import Clock
from anabranch._ports.kinesis_writing import KinesisWriting
from anabranch.errors import AnabranchError, ProducerError, UsageError
from anabranch.events import Event, HookFailed, RecordsAbandoned, WriterFailed
from anabranch.records import PutResult
from anabranch.reports import FlushReport

__all__ = ["Writer"]


class _Wait(msgspec.Struct, frozen=True):
    """Somebody waits for a state of the writer, which is looked at after each step."""

    is_over: Callable[[], bool]
    deadline_ms: int | None
    future: asyncio.Future[bool]


class Writer:
    def __init__(
        self,
        kinesis: KinesisWriting,
        clock: Clock,
        entropy: Entropy,
        rules: WritingRules,
        *,
        buffer_bytes: int,
        on_undelivered: Callable[[PutResult], Any] | None,
        emit: Callable[[Event], None],
    ) -> None:
        def make_pipeline(stream: str) -> Pipeline[Delivery]:
            return Pipeline(stream, rules, Delivery, entropy=entropy, notify=emit)

        self.intake = Intake(clock, make_pipeline, buffer_bytes=buffer_bytes, wake=self._wake)
        self._kinesis = kinesis
        self._clock = clock
        self._on_undelivered = on_undelivered
        self._emit = emit
        self._waits: list[_Wait] = []
        self._calls: dict[int, Call] = {}
        self._failure: ProducerError | None = None
        self._is_closing = False
        """Whoever closes is told of the failures that nobody has seen."""
        self._alarm = Alarm(clock)
        self._armed_ms: int | None = None
        self._host = BackgroundTask()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._tasks: asyncio.TaskGroup | None = None

    # life

    def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._host.start(self._run(), "anabranch-producer")

    async def close(self, deadline_ms: int | None) -> FlushReport:
        """Delivers everything, or fails what could not be delivered in time. Raises the failures nobody has seen."""
        self.intake.stop(UsageError("this producer is closed"))
        self._is_closing = True
        try:
            await self._flush(deadline_ms)
        except BaseException:
            self._is_closing = False  # cut off: the log is told instead
            raise
        finally:
            await self._host.cancel()
            tell_no_more(self)
        self._raise_unseen()
        if self._failure is not None:
            raise self._failure
        return FlushReport()

    async def _run(self) -> None:
        try:
            async with asyncio.TaskGroup() as tasks:
                self._tasks = tasks
                while True:
                    self._armed_ms = self._step()
                    await self._alarm.wait(self._armed_ms)
        except Exception as error:  # noqa: BLE001 -- supervisor: whatever broke, every record gets its outcome
            if self._loop is None or not self._loop.is_closed():  # else the task is what a loop left behind
                self._fail(error)
        finally:
            self._abandon()
            if not self._is_closing and self._failure is None:
                self.tell_unfinished()

    def tell_unfinished(self) -> None:
        """Nobody will be told by a flush or a close."""
        tell_no_more(self)
        for stream in self.intake.streams.values():
            if record_count := stream.pipeline.count_unfinished():
                self._emit(RecordsAbandoned(stream=str(stream.name), record_count=record_count))

    def _fail(self, error: Exception) -> None:
        cause = single_cause(error)
        failure = ProducerError(f"this producer has failed: {cause!r}")
        failure.__cause__ = cause
        self._failure = failure
        self.intake.stop(failure)
        record_count = sum(stream.pipeline.count_unfinished() for stream in self.intake.streams.values())
        self._emit(WriterFailed(error=repr(cause), record_count=record_count))

    def _abandon(self) -> None:
        """The host ends: what is left gets its outcome, and whoever waits is woken.

        After an unexpected error too, so it relies on nothing but the list of bundles.
        """
        now_ms = self._clock.now_ms()
        failure = None if self._failure is None else str(self._failure)
        self._calls.clear()
        for stream in self.intake.streams.values():
            stream.pipeline.abandon(failure, now_ms)
            self._settle(stream)
        self.intake.stop(UsageError("the event loop of this producer has ended"))
        self.intake.turn_away()
        for wait in self._waits:
            if not wait.future.done():
                wait.future.set_result(wait.is_over())
        self._waits.clear()

    # flushing

    async def flush(self, deadline_ms: int | None) -> FlushReport:
        """A barrier: everything put before is settled when it returns, unless the deadline came first."""
        if self.intake.refusal is not None:
            raise self.intake.refusal
        is_complete = await self._flush(deadline_ms)
        self._raise_unseen()
        if not self._host.is_running and self.intake.refusal is not None:
            raise self.intake.refusal
        return FlushReport(is_complete, 0 if is_complete else self._count_pending())

    async def _flush(self, deadline_ms: int | None) -> bool:
        last = self.intake.last_in_queue
        if last is not None and not await self._until(last.done, deadline_ms):
            return False
        now_ms = self._clock.now_ms()
        try:
            marks = [(stream.pipeline, stream.pipeline.flush(now_ms)) for stream in self.intake.streams.values()]
        finally:
            self._wake()
        return await self._until(lambda: all(pipeline.is_flushed(epoch) for pipeline, epoch in marks), deadline_ms)

    async def _until(self, is_over: Callable[[], bool], deadline_ms: int | None) -> bool:
        if not self._host.is_running:
            return is_over()
        future: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._waits.append(_Wait(is_over, deadline_ms, future))
        self._wake()
        return await future

    def _count_pending(self) -> int:
        in_flight = sum(len(bundle.records) for call in self._calls.values() for bundle in call.bundles)
        return in_flight + sum(stream.pipeline.count_waiting() for stream in self.intake.streams.values())

    def _raise_unseen(self) -> None:
        if failed := self.intake.take_unseen():
            raise failure_of(failed)

    # steps

    def _wake(self) -> None:
        if self._host.is_running:
            tell_at_exit(self)
        self.intake.is_awake = True
        self._alarm.ring()

    def _step(self) -> int | None:
        """Everything that can be done now. Returns when there is more to do by time alone."""
        intake = self.intake
        intake.is_awake = True  # what is put during the step is seen by it
        now_ms, wall_ms = self._clock.now_ms(), self._clock.wall_ms()
        intake.free()
        intake.admit()
        for stream in intake.in_turn():
            pipeline = stream.pipeline
            if pipeline.fault is not None:
                raise pipeline.fault
            deadline_ms = pipeline.next_deadline_ms
            while pipeline.wants_tick or (deadline_ms is not None and deadline_ms <= now_ms):
                steps, deadline_ms = pipeline.tick(now_ms, wall_ms), None
                for call in steps.calls:
                    self._calls[id(call)] = call
                    self._spawn(self._send(stream, call))
                if steps.refresh:
                    self._spawn(self._refresh(stream))
                self._settle(stream)
                intake.admit()
        intake.is_awake = False
        if intake.is_empty:
            tell_no_more(self)
        return self._look_at_waits(now_ms)

    def _step_after_answer(self) -> None:
        """What the answer changed is done at once; the host hears of it only if it has to get up earlier, or never."""
        deadline_ms, armed_ms = self._step(), self._armed_ms
        is_right = armed_ms is None if deadline_ms is None else armed_ms is not None and armed_ms <= deadline_ms
        if not is_right:
            self._wake()

    def _look_at_waits(self, now_ms: int) -> int | None:
        deadlines = [stream.pipeline.next_deadline_ms for stream in self.intake.streams.values()]
        for wait in self._waits:
            if wait.future.done():
                continue
            if wait.is_over():
                wait.future.set_result(True)
            elif wait.deadline_ms is not None and now_ms >= wait.deadline_ms:
                wait.future.set_result(False)
            else:
                deadlines.append(wait.deadline_ms)
        self._waits = [wait for wait in self._waits if not wait.future.done()]
        return min((deadline for deadline in deadlines if deadline is not None), default=None)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        assert self._tasks is not None
        self._tasks.create_task(work)

    async def _send(self, stream: WrittenStream, call: Call) -> None:
        answer = await send(self._kinesis, stream.name, call)
        stream.pipeline.on_answer(call, answer, self._clock.now_ms())
        del self._calls[id(call)]
        self._step_after_answer()

    async def _refresh(self, stream: WrittenStream) -> None:
        listed = await list_stream(self._kinesis, stream.name, with_summary=stream.pipeline.wants_summary)
        now_ms = self._clock.now_ms()
        if isinstance(listed, AnabranchError):
            stream.pipeline.on_listing_failed(listed, now_ms)
        else:
            stream.pipeline.on_listing(*listed, now_ms)
        self._step_after_answer()

    # outcomes

    def _settle(self, stream: WrittenStream) -> None:
        for bundle in stream.pipeline.take_settled():
            try:
                if bundle.is_settled:
                    if bundle.sequence_number is not None:
                        self.intake.used_bytes -= bundle.cost_bytes
                    else:
                        self._offer(bundle)
            finally:
                waiters, bundle.waiters = bundle.waiters, None
                for _, wake in waiters or ():
                    wake()
            bundle.release()
        self.intake.free()

    def _offer(self, bundle: Bundle) -> None:
        """A failure is seen by who awaits it; else the hook may take it; else it waits to be raised."""
        awaited = {id(record) for record, _ in bundle.waiters or ()}
        for record in bundle.records:
            if id(record) in awaited:
                bundle.failures.see(record)
            elif self._on_undelivered is not None:
                self._hand_over(self._on_undelivered, record, bundle.failures)

    def _hand_over(self, hook: Callable[[PutResult], Any], record: Delivery, failures: Failures) -> None:
        failures.see(record)  # before the hook runs: it may put the record again
        try:
            taken = hook(record.put_result)
            if inspect.iscoroutine(taken):
                taken.close()
                raise TypeError("on_undelivered is asynchronous; it must be a plain function")  # noqa: TRY301 -- as below
        except Exception as error:  # noqa: BLE001 -- supervisor: what the hook did not take is raised by the next flush
            self._emit(HookFailed(stream=record.bundle.stream, hook="on_undelivered", error=repr(error)))
            failures.add([record])
            self.intake.used_bytes += cost_of(record.data, record.partition_key)
