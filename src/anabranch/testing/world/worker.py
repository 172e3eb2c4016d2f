"""A worker of a simulated fleet: the real engine in a simulated process."""

from anabranch._core.leases.machine import MemberProfile
from anabranch._core.leases.timing import LeaseTiming
from anabranch._core.reading.pace import PaceLimits
from anabranch._engine.consumer_run import ConsumerRun
from anabranch._engine.handler_calls import HandlerOptions
from anabranch._engine.ports import Ports
from anabranch._engine.stop_conditions import StopConditions
from anabranch._engine.worker import WorkerPlan
from anabranch._model.leases import AppRow
from anabranch._model.streams import Position, StreamName
from anabranch._ports import Kinesis, LeaseStore
from anabranch.budget import READ_RESERVE_BYTES, Budget
from anabranch.config import CheckpointSettings, ConsumerSettings, LeaseSettings
from anabranch.errors import (
    AnabranchError,
    LeaseStoreInvalidError,
    ShardStoppedError,
    StreamError,
    StreamNotFoundError,
)
from anabranch.events import DataLost, Event, LeaseLost, LeaseTaken, StreamChanged, ZombieCall
from anabranch.policies import Retry
from anabranch.testing.journal import (
    CleanStop,
    LeaseLossReported,
    ProcessDied,
    SuccessReported,
    UnseenError,
    ZombieReported,
    incarnation_name,
)
from anabranch.testing.world.forms import FORMS
from anabranch.testing.world.labour import Labour, PretendedError
from anabranch.testing.world.processes import SimulatedProcess
from anabranch.testing.world.stream import STREAM
from anabranch.testing.world.surroundings import Surroundings

__all__ = ["SimulatedWorker"]

_STOP_SECONDS = 20.0
_ATTEMPTS = 10
"""More than ever fail: a pause may make one overrun that would not have."""


class SimulatedWorker:
    def __init__(
        self,
        process: SimulatedProcess,
        around: Surroundings,
        *,
        kinesis: Kinesis,
        store: LeaseStore,
        timing: LeaseTiming,
    ) -> None:
        self.process = process
        self.is_stopping = False
        self._around = around
        self._journal = around.journal
        self._options = around.options
        limit_bytes = READ_RESERVE_BYTES + self._options.budget_bytes
        self._budget = Budget(limit_bytes) if self._options.budget_bytes else Budget()
        self._labour = Labour(process, around, self._budget)
        ports = Ports(
            kinesis=kinesis,
            store=store,
            clock=process.clock,
            entropy=around.random,
            emit=self._hear,
            before_call=self._labour.before_call if self._options.gaps else None,
        )
        self._consumer_run = ConsumerRun(ports, self._plan(timing), self._handler_options(), self._budget)
        self.task = process.spawn(self._live(), process.name)

    @property
    def has_joined(self) -> bool:
        return self._consumer_run.worker.has_joined

    @property
    def is_at_work(self) -> bool:
        return self.has_joined and self.process.is_alive and not self.task.done()

    def _plan(self, timing: LeaseTiming) -> WorkerPlan:
        options, random = self._options, self._around.random
        name = "billing" if options.same_worker_id else self.process.name
        return WorkerPlan(
            app=AppRow(app="billing", app_id=f"{random.getrandbits(64):016x}", created_wall_ms=0),
            streams=(StreamName(STREAM),),
            start="trim_horizon",
            profile=MemberProfile(worker_id=name, fingerprint=f"order {options.order}"),
            timing=timing,
            pace=PaceLimits(),
            stop_conditions=StopConditions(at_tip=options.ends_at_tip),
            settings=ConsumerSettings(
                checkpoints=CheckpointSettings(interval=options.checkpoint_seconds),
                leases=LeaseSettings(hand_off=options.hand_off, drain_deadline=options.drain_seconds),
            ),
        )

    def _handler_options(self) -> HandlerOptions:
        options, given = self._options, self._around.handling
        policy = given.policy or Retry(attempts=_ATTEMPTS, timeout=options.timeout_seconds or None)
        decode = self._labour.decode if given.decode is None and options.undecodable else given.decode
        return HandlerOptions(order=options.order, concurrency=options.concurrency, decode=decode, policy=policy)

    def _hear(self, event: Event) -> None:
        stream, shard_id = self._around.stream, event.shard_id
        if isinstance(event, StreamChanged):
            stream.changes_told += 1
        if shard_id is None:
            return
        if isinstance(event, LeaseTaken):
            self._labour.tokens[shard_id] = event.fence_token
        elif isinstance(event, LeaseLost):
            for incarnation in range(stream.incarnation + 1):
                self._journal.tell(LeaseLossReported(self.process.name, incarnation_name(shard_id, incarnation)))
        elif isinstance(event, ZombieCall):
            position = Position.parse(event.position)
            noted = stream.place(shard_id, position.sequence_number)
            self._journal.tell(ZombieReported(self.process.name, noted, position))
        elif isinstance(event, DataLost):
            stream.excuse(shard_id, event.read_through_seconds)

    async def _live(self) -> None:
        try:
            await FORMS[self._options.form](self._consumer_run, self._labour)
            if not self.is_stopping:
                self._journal.tell(SuccessReported(self.process.world_ms(), self.process.name))
        except PretendedError as error:
            # The loop was left by it; whoever runs the fleet starts the process again.
            if isinstance(error.__context__, AnabranchError):
                self._judge(error.__context__)
        except Exception as error:  # noqa: BLE001 -- few faults of this world should end a worker that has joined
            self._judge(error)
        finally:
            self._journal.tell(ProcessDied(self.process.world_ms(), self.process.name))

    def _judge(self, error: Exception) -> None:
        if self.has_joined and not self._is_due(error):
            what = f"{self.process.name} ended in {type(error).__name__}: {error}"
            self._journal.tell(UnseenError(self.process.world_ms(), what))

    def _is_due(self, error: Exception) -> bool:
        """Whether a worker should end in this error, by what has happened in its world."""
        stream, due = self._around.stream, list[type[Exception]]([ShardStoppedError])
        if self._around.rows.has_lost_streams:
            due.append(LeaseStoreInvalidError)
        if stream.incarnation > 0 or not stream.is_there:
            due += [StreamError, StreamNotFoundError]
        causes = error.exceptions if isinstance(error, ExceptionGroup) else (error,)
        return all(isinstance(cause, tuple(due)) for cause in causes)

    def stop(self) -> None:
        """A clean stop, from inside the process."""
        self.is_stopping = True
        self.process.spawn(self._stop(), f"stop {self.process.name}")

    async def _stop(self) -> None:
        try:
            report = await self._consumer_run.stop(_STOP_SECONDS)
        except Exception:  # noqa: BLE001 -- it is told in _live
            return
        if report.committed and report.released and not report.leftovers:
            self._journal.tell(CleanStop(self.process.world_ms(), self.process.name, self._budget.used_bytes))
