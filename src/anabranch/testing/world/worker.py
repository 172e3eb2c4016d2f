"""A worker of a simulated fleet: the real engine in a simulated process, with a handler that tells the journal what it
does.
"""

import asyncio
import contextvars
import sys
from collections.abc import Awaitable, Callable, Sequence
from contextlib import aclosing
from random import Random
from typing import Any, Final, NamedTuple
from zlib import crc32

from msgspec.structs import replace

from anabranch._core.handling.batches import BatchLimits
from anabranch._core.leases.machine import MemberProfile
from anabranch._core.leases.timing import LeaseTiming
from anabranch._core.reading.pace import PaceLimits
from anabranch._engine.consumer_run import (
    ConsumerRun,
    EngineMode,
    HandleBatches,
    HandleRecords,
    IterateBatches,
    IterateRecords,
    RunPlan,
)
from anabranch._engine.fanout_registration import FanOutPlan
from anabranch._engine.handler_calls import HandlerCall, HandlerOptions
from anabranch._engine.ports import Ports
from anabranch._engine.stop_conditions import StopConditions
from anabranch._model.leases import AppRow
from anabranch._model.streams import Position, StreamName
from anabranch._ports import Kinesis, LeaseStore
from anabranch.budget import READ_RESERVE_BYTES, Budget
from anabranch.config import CheckpointSettings, ConsumerSettings, LeaseSettings
from anabranch.errors import (
    AnabranchError,
    DeadLetterError,
    LeaseStoreInvalidError,
    ShardStoppedError,
    StreamError,
    StreamNotFoundError,
)
from anabranch.events import DataLost, Event, LeaseLost, LeaseTaken, RecordSkipped, StreamChanged, ZombieCall
from anabranch.letters import Letter
from anabranch.policies import DeadLetter, Retry, Skip, Stop
from anabranch.records import Batch, BatchFailure, Context, Record
from anabranch.testing import journal as facts
from anabranch.testing.world.kinesis import STREAM, SimulatedStream
from anabranch.testing.world.lease_store import SimulatedRows
from anabranch.testing.world.options import OVERRUN_SECONDS_MAX, ConsumeMode, FleetOptions
from anabranch.testing.world.processes import Network, SimulatedProcess

APP = "billing"

Handler = Callable[[Any, Context], Awaitable[Any]]
"""Of records, or of batches."""


class UserHandler(NamedTuple):
    """What the caller of `simulate` passed. Without a handler, the simulation uses its own."""

    handler: Handler | None = None
    policy: Retry | None = None
    decode: Callable[[bytes], Any] | None = None
    batches: BatchLimits | None = None


class SimContext(NamedTuple):
    """What all processes of a fleet share."""

    options: FleetOptions
    random: Random
    network: Network
    journal: facts.Journal
    stream: SimulatedStream
    rows: SimulatedRows
    user_handler: UserHandler
    tries: dict[bytes, int]
    """How many times each record was tried by loops, in all processes. Loops have no attempt count of their own."""


_WAS_PAUSED: contextvars.ContextVar[bool] = contextvars.ContextVar("was_paused", default=False)


class SimulatedError(Exception):
    """A simulated handler failed on purpose."""


def is_poison(data: bytes, options: FleetOptions) -> bool:
    return crc32(b"poison" + data) % 1000 / 1000 < options.poison


class SimulatedLetters:
    """The dead-letter destination, as one process reaches it."""

    def __init__(self, process: SimulatedProcess, context: SimContext) -> None:
        self._process = process
        self._context = context

    def __str__(self) -> str:
        return "simulated letters"

    async def check(self, retention_hours: int) -> list[str]:  # noqa: ARG002 -- it keeps them forever
        return []

    async def write(self, letter: Letter) -> None:
        await self._context.network.call(
            self._process, "letters", lambda: self._keep(letter), lambda: DeadLetterError("no answer")
        )

    def _keep(self, letter: Letter) -> None:
        context, position = self._context, Position(int(letter.sequence_number), letter.sub_sequence_number)
        shard_id = context.stream.journal_shard_id(letter.shard_id, position.sequence_number)
        record = facts.StreamRecord(shard_id, position, letter.partition_key or "")
        context.journal.tell(
            facts.LetterWritten(self._process.world_ms(), self._process.name, record, letter.idempotency_key)
        )

    async def close(self) -> None:
        """Nothing is open."""


class SimulatedHandler:
    """Takes a while, fails some attempts and then succeeds. Sometimes it takes far too long and ignores its
    cancellation. Every start and end is written to the journal.
    """

    def __init__(self, process: SimulatedProcess, context: SimContext, budget: Budget) -> None:
        self._process = process
        self._context = context
        self._network = context.network
        self._journal = context.journal
        self._options = context.options
        self._random = context.random
        self._budget = budget
        self._batch_count = 0
        self.tokens: dict[str, int] = {}
        """The fence tokens of the shards that this process owns."""

    # what the engine calls

    async def handle(self, record: Record[Any], context: Context) -> None:
        given = self._context.user_handler.handler
        body = self._simulate_work([record], context.attempt) if given is None else given(record, context)
        await self._end(self._start([record], context.fence_token, context.attempt), body)

    async def handle_batch(self, batch: Batch[Any], context: Context) -> None:
        given = self._context.user_handler.handler
        body = self._simulate_work(batch.records, context.attempt) if given is None else given(batch, context)
        await self._end(self._start(batch.records, context.fence_token, context.attempt), body)

    async def handle_in_loop(self, records: Sequence[Record[Any]]) -> None:
        """The body of an `async for` loop."""
        await self.work(records, self.begin(records))

    def begin(self, records: Sequence[Record[Any]]) -> list[facts.RecordCall]:
        """Tells the journal that the records start. Call `work` or `work_until_done` next."""
        return self._start(records, self.tokens[records[0].shard_id])

    async def work(self, records: Sequence[Record[Any]], calls: list[facts.RecordCall]) -> None:
        await self._end(calls, self._try(records))

    async def work_until_done(self, records: Sequence[Record[Any]], calls: list[facts.RecordCall]) -> None:
        """Retries by itself, as a caller with manual acknowledgement does. To the engine this is one call."""
        await self._end(calls, self._try_until_done(records))

    async def _try_until_done(self, records: Sequence[Record[Any]]) -> None:
        while True:
            try:
                return await self._try(records)
            except SimulatedError:
                """Try again."""

    async def _try(self, records: Sequence[Record[Any]]) -> None:
        # An error ends the loop and with it the process, so only few records fail, once or twice each.
        data = records[0].data
        tries = self._context.tries
        tried = tries[data] = tries.get(data, 0) + 1
        await self._simulate_work(records, tried if crc32(data) % 7 == 0 else tried + 2)

    async def before_call(self) -> None:
        if not self._network.is_calm and self._random.random() < self._options.paused_starts:
            _WAS_PAUSED.set(True)
            self._process.pause(self._random.uniform(1, 25))
            await asyncio.sleep(0)

    def decode(self, data: bytes) -> bytes:
        if not self._network.is_calm and crc32(data) % 1000 / 1000 < self._options.undecodable:
            raise SimulatedError("a simulated failure")
        if self._is_loop and is_poison(data, self._options):
            raise SimulatedError("poison")
        return data

    @property
    def _is_loop(self) -> bool:
        return self._options.consume_mode not in {"run", "run_batches"}

    # the journal

    def _start(self, records: Sequence[Record[Any]], fence_token: int, attempt: int = 0) -> list[facts.RecordCall]:
        was_paused = _WAS_PAUSED.get()
        _WAS_PAUSED.set(False)
        self._batch_count += 1
        batch = self._batch_count if len(records) > 1 else 0
        calls = [
            self._call(record, fence_token, was_paused=was_paused, batch=batch, attempt=attempt) for record in records
        ]
        for call in calls:
            self._journal.tell(facts.CallStarted(call))
        self._measure()
        return calls

    async def _end(self, calls: list[facts.RecordCall], body: Awaitable[Any]) -> None:
        try:
            await body
        except BaseException as error:
            failed = {record.position for record in error.failed} if isinstance(error, BatchFailure) else {}
            is_done = bool(failed)
            for call in calls:  # what precedes the first failed record is finished
                is_done = is_done and call.position not in failed
                kind = facts.CallFinished if is_done else facts.CallAbandoned
                self._journal.tell(kind(replace(call, at_ms=self._process.world_ms())))
            raise
        for call in calls:
            self._journal.tell(facts.CallFinished(replace(call, at_ms=self._process.world_ms())))
        self._measure()

    def _call(
        self, record: Record[Any], fence_token: int, *, was_paused: bool, batch: int, attempt: int
    ) -> facts.RecordCall:
        return facts.RecordCall(
            self._process.world_ms(),
            self._process.name,
            self._context.stream.journal_shard_id(record.shard_id, record.position.sequence_number),
            record.position,
            record.partition_key,
            fence_token,
            was_paused,
            batch,
            attempt,
        )

    def _measure(self) -> None:
        budget = self._budget
        now_ms, name = self._process.world_ms(), self._process.name
        most_bytes = budget.limit_bytes + budget.overdraft_bytes_max
        self._journal.tell(facts.BytesMeasured(now_ms, name, budget.used_bytes, most_bytes))
        self._journal.tell(facts.BytesMeasured(now_ms, name, budget.peak_bytes, most_bytes))

    # the simulated work

    async def _simulate_work(self, records: Sequence[Record[Any]], attempt: int) -> None:
        """The data of a record decides which attempts fail, so every process sees the same failures."""
        options, longest = self._options, self._options.handler_seconds_max
        seconds = self._random.uniform(-longest / 2, longest)  # a third of the calls return at once
        mark = crc32(records[0].data)
        dice = mark % 1000 / 1000
        if poison := [record for record in records if not self._is_loop and is_poison(record.data, options)]:
            await self._take(seconds / 2)
            raise BatchFailure(poison) if len(records) > 1 and mark % 2 else SimulatedError("poison")
        if self._network.is_down("handler"):
            await self._take(0.05)  # time passes: some callers try again at once
            raise SimulatedError("a simulated outage")
        if dice < options.failing and attempt <= 1 + mark // 1000 % 2:
            await self._take(seconds / 2)
            raise SimulatedError("a simulated failure")
        if options.failing <= dice < options.failing + options.overrunning and attempt == 1:
            await self._overrun()
        else:
            await self._take(seconds)

    async def _take(self, seconds: float) -> None:
        if seconds > 0:
            await self._sleep(seconds)

    async def _overrun(self) -> None:
        """Runs for a long time. When cancelled, it continues for a while, and then returns or raises."""
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


_BATCHES: Final = BatchLimits(max_records=10, max_wait_ms=500)
_DRAIN_SECONDS: Final = 20.0
_MANUAL_ACK_TASKS: Final = 8
"""Records in progress at once with manual acknowledgement."""


async def _run(run: ConsumerRun, handler: SimulatedHandler) -> None:  # noqa: ARG001 -- the run calls it
    await run.start()
    await run.wait()


async def _each_record(run: ConsumerRun, handler: SimulatedHandler) -> None:
    try:
        async with aclosing(run.records()) as records:
            async for record in records:
                await handler.handle_in_loop([record])
    finally:
        await _leave(run)


async def _each_batch(run: ConsumerRun, handler: SimulatedHandler) -> None:
    try:
        async with aclosing(run.batches()) as batches:
            async for batch in batches:
                await handler.handle_in_loop(batch.records)
    finally:
        await _leave(run)


async def _manual_ack(run: ConsumerRun, handler: SimulatedHandler) -> None:
    slots = asyncio.Semaphore(_MANUAL_ACK_TASKS)
    try:
        async with asyncio.TaskGroup() as group, aclosing(run.records()) as records:
            async for record in records:
                # Begin in the step that hands the record out: after a wait, the fence may have passed.
                group.create_task(_acknowledge(record, handler.begin([record]), run, handler, slots))
                await slots.acquire()
    finally:
        await _leave(run)


async def _acknowledge(
    record: Record[Any],
    calls: list[facts.RecordCall],
    run: ConsumerRun,
    handler: SimulatedHandler,
    slots: asyncio.Semaphore,
) -> None:
    try:
        await handler.work_until_done([record], calls)
        run.ack([record])
    finally:
        slots.release()


async def _leave(run: ConsumerRun) -> None:
    """Does what leaving `async with Consumer` does, with the error that is being raised, if any."""
    await run.leave(sys.exception(), _DRAIN_SECONDS)


CONSUME_MODES: Final[dict[ConsumeMode, Callable[[ConsumerRun, SimulatedHandler], Awaitable[None]]]] = {
    "batches": _each_batch,
    "manual_ack": _manual_ack,
    "records": _each_record,
    "run": _run,
    "run_batches": _run,
}


_STOP_SECONDS = 20.0
_ATTEMPTS = 10
"""More than the failures of any record, even if pauses cause timeouts too."""
_ATTEMPTS_AT_POISON = 3
_THEN: Final[dict[str, Stop | Skip | DeadLetter]] = {"stop": Stop(), "skip": Skip(), "dead_letter": DeadLetter()}


_OVERDRAFT_BYTES_MAX = 2_000


def simulated_budget(options: FleetOptions) -> Budget:
    if not options.budget_bytes:
        return Budget()
    budget = Budget(READ_RESERVE_BYTES + options.budget_bytes)
    budget.tip_reserve_bytes = options.tip_reserve_bytes or READ_RESERVE_BYTES
    budget.overdraft_bytes_max = _OVERDRAFT_BYTES_MAX
    return budget


class SimulatedWorker:
    def __init__(
        self,
        process: SimulatedProcess,
        context: SimContext,
        *,
        kinesis: Kinesis,
        store: LeaseStore,
        timing: LeaseTiming,
        budget: Budget,
    ) -> None:
        self.process = process
        self.is_stopping = False
        self._context = context
        self._journal = context.journal
        self._options = context.options
        self._budget = budget
        self._handler = SimulatedHandler(process, context, self._budget)
        ports = Ports(
            kinesis=kinesis,
            store=store,
            clock=process.clock,
            entropy=context.random,
            emit=self._on_event,
            letters=SimulatedLetters(process, context) if self._writes_letters else None,
            before_call=self._handler.before_call if self._options.paused_starts else None,
        )
        self._consumer_run = ConsumerRun(
            ports, self._plan(timing), self._engine_mode(), self._handler_options(), self._budget
        )
        self.task = process.spawn(self._live(), process.name)

    @property
    def _writes_letters(self) -> bool:
        given = self._context.user_handler.policy
        return self._options.then == "dead_letter" or (given is not None and isinstance(given.then, DeadLetter))

    @property
    def has_joined(self) -> bool:
        return self._consumer_run.has_joined

    @property
    def is_at_work(self) -> bool:
        return self.has_joined and self.process.is_alive and not self.task.done()

    def _plan(self, timing: LeaseTiming) -> RunPlan:
        options, random = self._options, self._context.random
        name = "billing" if options.same_worker_id else self.process.name
        return RunPlan(
            app=AppRow(app=APP, app_id=f"{random.getrandbits(64):016x}", created_wall_ms=0),
            streams=(StreamName(STREAM),),
            start="trim_horizon",
            profile=MemberProfile(worker_id=name, order=options.order),
            timing=timing,
            pace=PaceLimits(),
            fanout=FanOutPlan(app=APP) if options.read == "fanout" else None,
            stop_conditions=StopConditions(at_tip=options.ends_at_tip),
            settings=ConsumerSettings(
                checkpoints=CheckpointSettings(interval=options.checkpoint_seconds),
                leases=LeaseSettings(hand_off=options.hand_off, drain_deadline=options.drain_seconds),
            ),
        )

    def _engine_mode(self) -> EngineMode:
        match self._options.consume_mode:
            case "run":
                return HandleRecords(HandlerCall(self._handler.handle, threads=1))
            case "run_batches":
                return HandleBatches(
                    HandlerCall(self._handler.handle_batch, threads=1), self._context.user_handler.batches or _BATCHES
                )
            case "batches":
                return IterateBatches(_BATCHES)
            case mode:
                return IterateRecords(manual_ack=mode == "manual_ack")

    def _handler_options(self) -> HandlerOptions:
        options, given = self._options, self._context.user_handler
        policy = given.policy or Retry(
            attempts=_ATTEMPTS if not options.poison else _ATTEMPTS_AT_POISON,
            timeout=options.timeout_seconds or None,
            then=_THEN[options.then],
        )
        decode = given.decode
        if decode is None and (options.undecodable or options.poison):
            decode = self._handler.decode
        return HandlerOptions(order=options.order, concurrency=options.concurrency, decode=decode, policy=policy)

    def _on_event(self, event: Event) -> None:
        stream, shard_id = self._context.stream, event.shard_id
        if isinstance(event, StreamChanged):
            stream.changes_reported += 1
        if shard_id is None:
            return
        if isinstance(event, LeaseTaken):
            self._handler.tokens[shard_id] = event.fence_token
        elif isinstance(event, LeaseLost):
            for incarnation in range(stream.incarnation + 1):
                self._journal.tell(
                    facts.LeaseLossReported(self.process.name, facts.incarnation_name(shard_id, incarnation))
                )
        elif isinstance(event, ZombieCall):
            position = Position.parse(event.position)
            journal_id = stream.journal_shard_id(shard_id, position.sequence_number)
            self._journal.tell(facts.ZombieReported(self.process.name, journal_id, position))
        elif isinstance(event, RecordSkipped):
            position = Position.parse(event.position)
            journal_id = stream.journal_shard_id(shard_id, position.sequence_number)
            record = facts.StreamRecord(journal_id, position, event.partition_key)
            self._journal.tell(facts.SkipReported(self.process.world_ms(), self.process.name, record))
        elif isinstance(event, DataLost):
            stream.excuse(shard_id, event.read_through_seconds)

    async def _live(self) -> None:
        try:
            await CONSUME_MODES[self._options.consume_mode](self._consumer_run, self._handler)
            if not self.is_stopping:
                self._journal.tell(facts.SuccessReported(self.process.world_ms(), self.process.name))
        except SimulatedError as error:
            # The loop's body failed on purpose. The fleet restarts the process.
            if isinstance(error.__context__, AnabranchError):
                self._report_unexplained(error.__context__)
        except Exception as error:  # noqa: BLE001 -- an error that nothing explains is reported
            self._report_unexplained(error)
        finally:
            self._journal.tell(facts.ProcessDied(self.process.world_ms(), self.process.name))

    def _report_unexplained(self, error: Exception) -> None:
        if self.has_joined and not self._is_explained(error):
            what = f"{self.process.name} ended in {type(error).__name__}: {error}"
            self._journal.tell(facts.UnseenError(self.process.world_ms(), what))

    def _is_explained(self, error: Exception) -> bool:
        """Whether the faults so far explain that the worker ended in this error."""
        stream, expected = self._context.stream, list[type[Exception]]([ShardStoppedError])
        if self._context.rows.has_lost_streams:
            expected.append(LeaseStoreInvalidError)
        if stream.incarnation > 0 or not stream.exists:
            expected += [StreamError, StreamNotFoundError]
        causes = error.exceptions if isinstance(error, ExceptionGroup) else (error,)
        return all(isinstance(cause, tuple(expected)) for cause in causes)

    def stop(self) -> None:
        """Starts a graceful stop from inside the process."""
        self.is_stopping = True
        self.process.spawn(self._stop(), f"stop {self.process.name}")

    async def _stop(self) -> None:
        try:
            report = await self._consumer_run.stop(_STOP_SECONDS)
        except Exception:  # noqa: BLE001 -- `_live` reports it
            return
        if report.committed and report.released and not report.leftovers:
            self._journal.tell(facts.CleanStop(self.process.world_ms(), self.process.name, self._budget.used_bytes))
