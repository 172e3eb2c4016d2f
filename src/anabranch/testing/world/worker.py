"""A worker of a simulated fleet: the real engine in a simulated process."""

from collections.abc import Callable
from random import Random
from typing import Any, NamedTuple

from anabranch._core.leases.timing import LEASE_EXPIRY_MS_DEFAULT, lease_timing
from anabranch._core.reading.pace import PaceLimits
from anabranch._engine.consuming import Consuming, Handling
from anabranch._engine.member import MemberProfile
from anabranch._engine.outside import Outside
from anabranch._engine.worker_plan import WorkerPlan
from anabranch._model.leases import AppRow
from anabranch._model.streams import StreamName
from anabranch._ports.kinesis import Kinesis
from anabranch._ports.lease_store import LeaseStore
from anabranch.budget import READ_RESERVE_BYTES, Budget
from anabranch.config import ConsumerSettings, LeaseSettings
from anabranch.events import Event, LeaseLost, LeaseTaken
from anabranch.policies import Retry
from anabranch.testing.checkers import Journal
from anabranch.testing.world.forms import FORMS
from anabranch.testing.world.labour import Handler, Labour, PretendedError
from anabranch.testing.world.network import Network
from anabranch.testing.world.options import FleetOptions
from anabranch.testing.world.processes import SimulatedProcess
from anabranch.testing.world.stream import STREAM

__all__ = ["SimulatedHandling", "SimulatedWorker"]

_EXPIRIES_MS = (4_000, 10_000, 25_000)
_STOP_SECONDS = 20.0
_ATTEMPTS = 10
"""More than ever fail: a pause may make one overrun that would not have."""


class SimulatedHandling(NamedTuple):
    """What a user's own simulation does with its records; what is left out is pretended."""

    handler: Handler | None = None
    policy: Retry | None = None
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
        handling: SimulatedHandling,
        tries: dict[bytes, int],
    ) -> None:
        self.process = process
        self.error: BaseException | None = None
        self.is_stopping = False
        self._journal = journal
        self._options = options
        self._random = random
        self._budget = Budget(READ_RESERVE_BYTES + options.budget_bytes) if options.budget_bytes else Budget()
        self._labour = Labour(
            process, network, journal, options, random, budget=self._budget, tries=tries, handler=handling.handler
        )
        outside = Outside(
            kinesis=kinesis,
            store=store,
            clock=process.clock,
            entropy=random,
            emit=self._hear,
            before_call=self._labour.before_call if options.gaps else None,
        )
        self._consuming = Consuming(outside, self._plan(), self._handling(handling), self._budget)
        self.task = process.spawn(self._live(), process.name)

    def _plan(self) -> WorkerPlan:
        options = self._options
        expiry_ms = self._random.choice(_EXPIRIES_MS) if options.expiries_differ else LEASE_EXPIRY_MS_DEFAULT
        name = "billing" if options.same_worker_id else self.process.name
        return WorkerPlan(
            app=AppRow(app="billing", app_id=f"{self._random.getrandbits(64):016x}", created_wall_ms=0),
            streams=(StreamName(STREAM),),
            start="trim_horizon",
            profile=MemberProfile(worker_id=name, fingerprint=f"order {options.order}"),
            timing=lease_timing(expiry_ms),
            pace=PaceLimits(),
            settings=ConsumerSettings(
                leases=LeaseSettings(hand_off=options.hand_off, drain_deadline=options.drain_seconds)
            ),
        )

    def _handling(self, given: SimulatedHandling) -> Handling:
        options = self._options
        policy = given.policy or Retry(attempts=_ATTEMPTS, timeout=options.timeout_seconds or None)
        return Handling(order=options.order, concurrency=options.concurrency, decode=given.decode, policy=policy)

    def _hear(self, event: Event) -> None:
        if isinstance(event, LeaseTaken) and event.shard_id is not None:
            self._labour.tokens[event.shard_id] = event.fence_token
        elif isinstance(event, LeaseLost) and event.shard_id is not None:
            self._journal.lost(self.process.name, event.shard_id)

    async def _live(self) -> None:
        try:
            await FORMS[self._options.form](self._consuming, self._labour)
        except PretendedError:
            """The loop was left by it; whoever runs the fleet starts the process again."""
        except Exception as error:  # noqa: BLE001 -- no fault of this world should end a worker that has joined
            self.error = error
            if self._consuming.worker.has_joined:
                self._journal.failed(
                    self.process.world_ms(), f"{self.process.name} ended in {type(error).__name__}: {error}"
                )

    def stop(self) -> None:
        """A clean stop, from inside the process."""
        self.is_stopping = True
        self.process.spawn(self._stop(), f"stop {self.process.name}")

    async def _stop(self) -> None:
        try:
            report = await self._consuming.stop(_STOP_SECONDS)
        except Exception as error:  # noqa: BLE001 -- as in _live
            self.error = error
            return
        if report.committed and report.released and not report.leftovers:
            self._journal.stopped(self.process.world_ms(), self.process.name, self._budget.used_bytes)
