"""A worker of a simulated fleet: the real engine in a simulated process, with a handler that the journal hears of."""

import asyncio
import contextvars
from collections.abc import Awaitable, Callable
from random import Random
from typing import Any, NamedTuple

from anabranch._core.leases.timing import lease_timing
from anabranch._core.reading.pace import PaceLimits
from anabranch._engine.calls import HandlerCall
from anabranch._engine.consuming import Consuming, Handling
from anabranch._engine.member import MemberProfile
from anabranch._engine.outside import Outside
from anabranch._engine.worker_plan import WorkerPlan
from anabranch._model.leases import AppRow
from anabranch._model.streams import StreamName
from anabranch._ports.kinesis import Kinesis
from anabranch._ports.lease_store import LeaseStore
from anabranch.budget import Budget
from anabranch.config import ConsumerSettings, LeaseSettings
from anabranch.events import Event
from anabranch.policies import Retry
from anabranch.records import Context, Record
from anabranch.testing.checkers import Call, Journal
from anabranch.testing.world.network import Network
from anabranch.testing.world.options import FleetOptions
from anabranch.testing.world.processes import SimulatedProcess

__all__ = ["STREAM", "SimulatedHandling", "SimulatedWorker"]

STREAM = "orders"

_WAS_PAUSED: contextvars.ContextVar[bool] = contextvars.ContextVar("was_paused", default=False)


class SimulatedHandling(NamedTuple):
    """What a simulated fleet does with its records: nothing that takes longer than the options say, by default."""

    handler: Callable[[Record[Any], Context], Awaitable[Any]] | None = None
    policy: Retry = Retry()
    decode: Callable[[bytes], Any] | None = None


class SimulatedWorker:
    def __init__(
        self,
        process: SimulatedProcess,
        network: Network,
        journal: Journal,
        options: FleetOptions,
        random: Random,
        *,
        kinesis: Kinesis,
        store: LeaseStore,
        handling: "SimulatedHandling",
    ) -> None:
        self.process = process
        self.events: list[Event] = []
        self.error: BaseException | None = None
        self.is_stopping = False
        self._network = network
        self._journal = journal
        self._options = options
        self._random = random
        self._handler = handling.handler or self._pretend
        self._given = handling
        self._budget = Budget()
        outside = Outside(
            kinesis=kinesis,
            store=store,
            clock=process.clock,
            entropy=random,
            emit=self.events.append,
            before_call=self._before_call if options.gaps else None,
        )
        self._consuming = Consuming(outside, self._plan(), self._handling(), self._budget)
        self.task = process.spawn(self._live(), process.name)

    def _plan(self) -> WorkerPlan:
        options = self._options
        name = "billing" if options.same_worker_id else self.process.name
        return WorkerPlan(
            app=AppRow(app="billing", app_id=f"{self._random.getrandbits(64):016x}", created_wall_ms=0),
            streams=(StreamName(STREAM),),
            start="trim_horizon",
            profile=MemberProfile(worker_id=name, fingerprint=f"order {options.order}"),
            timing=lease_timing(),
            pace=PaceLimits(),
            settings=ConsumerSettings(
                leases=LeaseSettings(hand_off=options.hand_off, drain_deadline=options.drain_seconds)
            ),
        )

    def _handling(self) -> Handling:
        options = self._options
        given = self._given
        return Handling(order=options.order, concurrency=options.concurrency, decode=given.decode, policy=given.policy)

    async def _live(self) -> None:
        call = HandlerCall(self._handle, threads=1)
        try:
            await self._consuming.start(self._consuming.handle_records(call))
            await self._consuming.wait()
        except Exception as error:  # noqa: BLE001 -- no fault of this world should end a worker that has joined
            self.error = error
            if not self._consuming.worker.has_joined:
                return
            at_ms = int(asyncio.get_running_loop().time() * 1000)
            self._journal.failed(at_ms, f"{self.process.name} ended in {type(error).__name__}: {error}")

    def stop(self) -> None:
        """A clean stop, from inside the process."""
        self.is_stopping = True
        self.process.spawn(self._stop(), f"stop {self.process.name}")

    async def _stop(self) -> None:
        try:
            await self._consuming.stop(20.0)
        except Exception as error:  # noqa: BLE001 -- as in _live
            self.error = error

    async def _before_call(self) -> None:
        if not self._network.is_calm and self._random.random() < self._options.gaps:
            _WAS_PAUSED.set(True)
            self.process.pause(self._random.uniform(1, 25))
            await asyncio.sleep(0)

    async def _handle(self, record: Record[bytes], context: Context) -> None:
        was_paused = _WAS_PAUSED.get()
        _WAS_PAUSED.set(False)
        self._journal.started(self._call(record, context, was_paused=was_paused))
        self._measure()
        try:
            await self._handler(record, context)
        except BaseException:
            self._journal.abandoned(self._call(record, context, was_paused=was_paused))
            raise
        self._journal.finished(self._call(record, context, was_paused=was_paused))
        self._measure()

    async def _pretend(self, _record: Record[Any], _context: Context) -> None:
        seconds = self._random.uniform(0, self._options.handler_seconds_max)
        await self.process.clock.sleep_until_ms(self.process.clock.now_ms() + int(seconds * 1000))

    def _call(self, record: Record[bytes], context: Context, *, was_paused: bool) -> Call:
        return Call(
            int(asyncio.get_running_loop().time() * 1000),
            self.process.name,
            record.shard_id,
            record.position,
            record.partition_key,
            context.fence_token,
            was_paused,
        )

    def _measure(self) -> None:
        at_ms = int(asyncio.get_running_loop().time() * 1000)
        self._journal.measured(at_ms, self.process.name, self._budget.used_bytes, self._budget.limit_bytes)
