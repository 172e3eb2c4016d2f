"""A worker of a simulated fleet: the real engine in a simulated process, with a handler that tells the journal what it
does.
"""

from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any, cast

from msgspec.structs import replace

from anabranch._core.leases.machine import MemberProfile
from anabranch._core.leases.timing import LeaseTiming
from anabranch._core.reading.pace import PaceLimits
from anabranch._engine.consumer_run import ConsumerRun, EngineMode, RunPlan
from anabranch._engine.handler_calls import HandlerCall, HandlerOptions
from anabranch._model.leases import AppRow
from anabranch._model.streams import Position, StreamName
from anabranch._ports import Kinesis, Ports
from anabranch.budget import Budget
from anabranch.config import CheckpointSettings, ConsumerSettings, LeaseSettings
from anabranch.errors import DeadLetterError, ShardStoppedError
from anabranch.events import Event, LeaseLost, RecordSkipped, ZombieCall
from anabranch.letters import Letter
from anabranch.policies import DeadLetter
from anabranch.records import Batch, BatchFailure, Context, Record
from anabranch.testing import journal as facts
from anabranch.testing.world.options import APP, STREAM
from anabranch.testing.world.processes import SimulatedProcess

if TYPE_CHECKING:
    from anabranch.testing.world.fleet import SimulatedFleet


class SimulatedLetters:
    """The dead-letter destination, as one process reaches it."""

    def __init__(self, process: SimulatedProcess, fleet: "SimulatedFleet") -> None:
        self._process = process
        self._fleet = fleet

    def __str__(self) -> str:
        return "simulated letters"

    async def check(self, retention_hours: int) -> list[str]:  # noqa: ARG002 -- it keeps them forever
        return []

    async def write(self, letter: Letter) -> None:
        await self._fleet.network.call(
            self._process, "letters", lambda: self._keep(letter), DeadLetterError("no answer")
        )

    def _keep(self, letter: Letter) -> None:
        fleet, position = self._fleet, Position(int(letter.sequence_number), letter.sub_sequence_number)
        shard_id = fleet.stream.journal_shard_id(letter.shard_id, position.sequence_number)
        record = facts.StreamRecord(shard_id, position, letter.partition_key or "")
        fleet.journal.tell(
            facts.LetterWritten(self._process.world_ms(), self._process.name, record, letter.idempotency_key)
        )

    async def close(self) -> None:
        """Nothing is open."""


class JournaledHandler:
    """Calls the user's handler, and tells the journal every start and end."""

    before_call: Callable[[], Awaitable[None]] | None = None
    """Awaited before the engine starts a call."""

    def __init__(self, process: SimulatedProcess, fleet: "SimulatedFleet", budget: Budget) -> None:
        self._process = process
        self._fleet = fleet
        self._journal = fleet.journal
        self._budget = budget
        self._batch_count = 0

    async def handle(self, given: Record[Any] | Batch[Any], context: Context) -> None:
        records = given.records if isinstance(given, Batch) else [given]
        calls = self._start(records, context.fence_token, context.attempt)
        await self._end(calls, self._work(given, context))

    async def _work(self, given: Record[Any] | Batch[Any], context: Context) -> None:
        await self._fleet.registered.handler(given, context)

    def _was_paused(self) -> bool:
        """Whether the process was paused between the check of the fence and this call."""
        return False

    def _start(self, records: Sequence[Record[Any]], fence_token: int, attempt: int = 0) -> list[facts.RecordCall]:
        was_paused = self._was_paused()
        self._batch_count += 1
        batch = self._batch_count if len(records) > 1 else 0
        calls = [
            facts.RecordCall(
                at_ms=self._process.world_ms(),
                process=self._process.name,
                shard_id=self._fleet.stream.journal_shard_id(record.shard_id, record.position.sequence_number),
                position=record.position,
                partition_key=record.partition_key,
                fence_token=fence_token,
                was_paused=was_paused,
                batch=batch,
                attempt=attempt,
            )
            for record in records
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

    def _measure(self) -> None:
        budget = self._budget
        now_ms, name = self._process.world_ms(), self._process.name
        most_bytes = budget.limit_bytes + budget.overdraft_bytes_max
        self._journal.tell(facts.BytesMeasured(now_ms, name, budget.used_bytes, budget.peak_bytes, most_bytes))


_DRAIN_SECONDS = 30.0
_STOP_SECONDS = 20.0


class SimulatedWorker:
    def __init__(self, process: SimulatedProcess, fleet: "SimulatedFleet", timing: LeaseTiming, budget: Budget) -> None:
        self.process = process
        self.is_stopping = False
        self._fleet = fleet
        self._journal = fleet.journal
        self._budget = budget
        self._handler = self._make_handler()
        writes_letters = isinstance(fleet.registered.options.policy.then, DeadLetter)
        kinesis = fleet.kinesis_class(fleet, process, budget)
        ports = Ports(
            kinesis=cast("Kinesis", kinesis),  # these fleets poll, so no operation of fan-out is called
            store=fleet.store_class(fleet, process, call_deadline_ms=timing.call_deadline_ms),
            clock=process.clock,
            entropy=fleet.random,
            emit=self._on_event,
            letters=SimulatedLetters(process, fleet) if writes_letters else None,
            before_call=self._handler.before_call,
        )
        self._consumer_run = ConsumerRun(
            ports, self._plan(timing), self._engine_mode(), self._handler_options(), self._budget
        )
        self.task = process.spawn(self._live(), process.name)

    @property
    def has_joined(self) -> bool:
        return self._consumer_run.has_joined

    def _make_handler(self) -> JournaledHandler:
        return JournaledHandler(self.process, self._fleet, self._budget)

    def _plan(self, timing: LeaseTiming) -> RunPlan:
        options = self._fleet.options
        return RunPlan(
            app=AppRow(app=APP, app_id=f"{self._fleet.random.getrandbits(64):016x}", created_wall_ms=0),
            streams=(StreamName(STREAM),),
            start="trim_horizon",
            profile=MemberProfile(worker_id=self.process.name, order=self._fleet.registered.options.order),
            timing=timing,
            pace=PaceLimits(),
            settings=ConsumerSettings(
                checkpoints=CheckpointSettings(interval=options.checkpoint_seconds),
                leases=LeaseSettings(drain_deadline=_DRAIN_SECONDS),
            ),
        )

    def _engine_mode(self) -> EngineMode:
        batches = self._fleet.registered.batches
        return EngineMode(HandlerCall(self._handler.handle, threads=1), batches)

    def _handler_options(self) -> HandlerOptions:
        return self._fleet.registered.options

    def _on_event(self, event: Event) -> None:
        process, shard_id = self.process, event.shard_id
        if shard_id is None:
            return
        if isinstance(event, LeaseLost):
            self._journal.tell(facts.LeaseLossReported(process.name, shard_id))
        elif isinstance(event, ZombieCall | RecordSkipped):
            position = Position.parse(event.position)
            journal_id = self._fleet.stream.journal_shard_id(shard_id, position.sequence_number)
            if isinstance(event, ZombieCall):
                self._journal.tell(facts.ZombieReported(process.name, journal_id, position))
            else:
                record = facts.StreamRecord(journal_id, position, event.partition_key)
                self._journal.tell(facts.SkipReported(process.world_ms(), process.name, record))

    async def _live(self) -> None:
        try:
            await self._consume()
            if not self.is_stopping:
                self._journal.tell(facts.SuccessReported(self.process.world_ms(), self.process.name))
        except Exception as error:  # noqa: BLE001 -- an error that nothing explains is reported
            self._report_unexplained(error)
        finally:
            self._journal.tell(facts.ProcessDied(self.process.world_ms(), self.process.name))

    async def _consume(self) -> None:
        await self._consumer_run.start()
        await self._consumer_run.wait()

    def _report_unexplained(self, error: Exception) -> None:
        causes = error.exceptions if isinstance(error, ExceptionGroup) else (error,)
        if self.has_joined and not all(isinstance(cause, self._explained_errors()) for cause in causes):
            what = f"{self.process.name} ended in {type(error).__name__}: {error}"
            self._journal.tell(facts.UnseenError(self.process.world_ms(), what))

    def _explained_errors(self) -> tuple[type[Exception], ...]:
        """The errors in which a worker may end after the faults so far."""
        return (ShardStoppedError,)

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
