"""One harsh fleet: also what exists before it starts, who watches it, and who operates it."""

import asyncio

from anabranch._core.leases.timing import LEASE_EXPIRY_MS_DEFAULT, lease_timing
from anabranch.application import Application
from anabranch.errors import LeaseError, UsageError
from anabranch.reasons import StoppedByHandler, StoppedByPayload
from anabranch.testing.journal import UnseenError
from anabranch.testing.world.fleet import SimulatedFleet
from anabranch.testing.world.options import APP
from anabranch.testing.world.processes import SimulatedProcess
from harsh.faults import HarshFaults, HarshNetwork
from harsh.lease_store import HarshLeaseStore, HarshRows
from harsh.stream import HarshKinesis, HarshStream
from harsh.worker import HarshWorker, registered_handler, simulated_budget

_AGGREGATE_MAX = 5
_CHECK_SECONDS = 1.0
_LOOK_SECONDS = 2.0
_SEEN_WITHIN_SECONDS = 60.0
"""After the faults. A worker that has just lost its membership joins again first."""
_EXPIRIES_MS = (4_000, 10_000, 25_000)


class HarshFleet(SimulatedFleet):
    network_class = HarshNetwork
    stream_class = HarshStream
    kinesis_class = HarshKinesis
    rows_class = HarshRows
    store_class = HarshLeaseStore
    worker_class = HarshWorker
    faults_class = HarshFaults

    def __init__(self, seed, options):
        super().__init__(seed, options, registered_handler(options), [])
        self.records = [
            (f"key-{self.random.randrange(options.key_count)}", str(number).encode())
            for number in range(options.record_count)
        ]
        self.tries = {}
        """How many times each record was tried by loops, in all processes. Loops have no attempt count of their own."""
        self._history_count = 0
        self._watchers = []

    def _keeps_order(self):
        mode = self.options.consume_mode
        return mode != "manual_ack" and (self.options.order != "none" or mode != "run")

    # writing

    async def _write_all(self):
        options, left = self.options, self.records[self._history_count :]
        await self._write(left, (len(left) if options.backlog else len(self.records)) / options.faulty_seconds)

    async def _write(self, records, rate):
        """Writes `rate` records a second; some as aggregates of a few successive ones for the same shard."""
        left = list(reversed(records))
        while left:
            some = [left.pop()]
            is_aggregate = self.random.random() < self.options.aggregated
            while is_aggregate and left and len(some) < _AGGREGATE_MAX and self._have_same_shard(some[0], left[-1]):
                some.append(left.pop())
            self.stream.write(some, is_aggregate=is_aggregate)
            await asyncio.sleep(self.random.expovariate(rate))

    def _have_same_shard(self, one, other):
        return self.stream.exists and self.stream.shard_for(one[0]) == self.stream.shard_for(other[0])

    def _write_history(self):
        """Writes what exists before the first worker starts: closed shards with records in them, and a backlog."""
        times = self.options.reshards_before
        self._history_count = len(self.records) // 3 if times else 0
        for number in range(times):
            low, high = (self._history_count * part // times for part in (number, number + 1))
            self.stream.write(self.records[low:high])
            self.stream.reshard()
        begun, self._history_count = (
            self._history_count,
            max(self._history_count, round(len(self.records) * self.options.backlog)),
        )
        self.stream.write(self.records[begun : self._history_count])

    # the workers

    def _draw_timing(self):
        if not self.options.expiries_differ:
            return super()._draw_timing()
        return lease_timing(self.random.choice(_EXPIRIES_MS))

    def _make_budget(self):
        return simulated_budget(self.options)

    # the run

    def _start_workers(self):
        self._write_history()
        super()._start_workers()
        if self.options.is_watched:
            self._watchers.append(SimulatedViewer(self))
        if self.options.poison:
            self._watchers.append(SimulatedOperator(self))

    async def _settle(self):
        await super()._settle()
        for watcher in self._watchers:
            await watcher.close()
        if self._has_unreported_change:
            self.journal.tell(
                UnseenError(self.now_ms(), "no worker reported that the stream was deleted and created again")
            )

    def _work_seconds(self):
        return self.options.work_seconds

    def _is_settled(self):
        return super()._is_settled() and not self._has_unreported_change

    @property
    def _has_unreported_change(self):
        """After the store was emptied, no worker can know that the stream was created again."""
        return self.stream.has_unreported_change and not (self.stream.exists and self.rows.emptied_count > 0)


class SimulatedViewer:
    """Somebody who looks at the fleet through the store, as `anabranch top` does. Each shard that does not move must
    have a reason, and once the faults are over, all live members must answer the watch mark.
    """

    def __init__(self, fleet):
        self._fleet = fleet
        self._process = SimulatedProcess("viewer", fleet)
        self._last = None
        self._task = self._process.spawn(self._look(), "viewer")

    async def _look(self):
        fleet = self._fleet
        while True:
            timing = lease_timing(LEASE_EXPIRY_MS_DEFAULT)
            store = fleet.store_class(fleet, self._process, call_deadline_ms=timing.call_deadline_ms)
            try:
                async with Application(APP, leases=store, clock=self._process.clock) as application:
                    while True:
                        self._check(await application.status())
                        await asyncio.sleep(_LOOK_SECONDS)
            except LeaseError:
                self._last = None  # no answer, or no application yet
                await asyncio.sleep(_LOOK_SECONDS)

    def _check(self, status):
        self._last = status
        for shard in status.stalled_shards:
            if shard.reason is None:
                self._complain(f"{shard.shard_id} is {shard.state} without a reason")

    def _complain(self, what):
        self._fleet.journal.tell(UnseenError(self._fleet.now_ms(), f"a viewer sees that {what}"))

    async def close(self):
        until = self._fleet.loop.time() + _SEEN_WITHIN_SECONDS
        while not self._sees_all() and self._fleet.loop.time() < until:  # noqa: ASYNC110 -- virtual time
            await asyncio.sleep(_CHECK_SECONDS)
        if not self._sees_all():
            self._complain(f"members do not report: {self._last}")
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    def _sees_all(self):
        at_work = {worker.process.name for worker in self._fleet.workers if worker.is_at_work}
        live = () if self._last is None else self._last.live_members
        seen = {self._fleet.rows.processes[member.member_id] for member in live if member.status_seen}
        return at_work <= seen


class SimulatedOperator:
    """Goes past the records at which shards are stopped, by the commands that people have: skips poison, and has other
    records tried again.
    """

    def __init__(self, fleet):
        self._fleet = fleet
        self._process = SimulatedProcess("operator", fleet)
        self._task = self._process.spawn(self._work(), "operator")

    async def _work(self):
        fleet = self._fleet
        deadline_ms = lease_timing(LEASE_EXPIRY_MS_DEFAULT).call_deadline_ms
        store = fleet.store_class(fleet, self._process, call_deadline_ms=deadline_ms)
        while True:
            await asyncio.sleep(fleet.random.uniform(1, 5))
            try:
                async with Application(APP, leases=store, clock=self._process.clock) as application:
                    for shard in (await application.status()).shards:
                        await self._go_past(application, shard)
            except (LeaseError, UsageError):
                """No answer, no application yet, or the shard goes on already."""

    async def _go_past(self, application, shard):
        if shard.stopped is None or shard.state != "stopped":
            return
        position = shard.stopped.position
        if position is not None and isinstance(shard.reason, StoppedByHandler | StoppedByPayload):
            await application.skip(shard.shard_id, position)
        else:
            await application.resume(shard.shard_id)

    async def close(self):
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
