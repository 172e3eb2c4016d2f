"""A worker of a harsh fleet: its handler fails, overruns or is paused, and it may consume by a loop."""

import asyncio
import contextvars
import sys
from contextlib import aclosing
from dataclasses import replace
from zlib import crc32

import msgspec

from anabranch._core.handling.batches import BatchLimits
from anabranch._engine.consumer_run import EngineMode
from anabranch._engine.fanout_registration import FanOutPlan
from anabranch._engine.handler_calls import HandlerOptions
from anabranch._engine.stop_conditions import StopConditions
from anabranch.budget import READ_RESERVE_BYTES, Budget
from anabranch.config import CheckpointSettings, ConsumerSettings, LeaseSettings
from anabranch.dead_letters.redrive import RegisteredHandler
from anabranch.errors import AnabranchError, LeaseStoreInvalidError, StreamError, StreamNotFoundError
from anabranch.events import DataLost, LeaseLost, LeaseTaken, StreamChanged
from anabranch.policies import DeadLetter, Retry, Skip, Stop
from anabranch.records import BatchFailure, Record
from anabranch.testing import journal as facts
from anabranch.testing.world.options import APP
from anabranch.testing.world.worker import JournaledHandler, SimulatedWorker
from harsh.options import OVERRUN_SECONDS_MAX

_ATTEMPTS = 10
"""More than the failures of any record, even if pauses cause timeouts too."""
_ATTEMPTS_AT_POISON = 3
_BATCHES = BatchLimits(max_records=10, max_wait_ms=500)
_DRAIN_SECONDS = 20.0
_MANUAL_ACK_TASKS = 8
"""Records in progress at once with manual acknowledgement."""
_OVERDRAFT_BYTES_MAX = 2_000
_THEN = {"stop": Stop(), "skip": Skip(), "dead_letter": DeadLetter()}

_WAS_PAUSED = contextvars.ContextVar("was_paused", default=False)


class SimulatedError(Exception):
    """A simulated handler failed on purpose."""


def is_poison(data, options):
    return crc32(b"poison" + data) % 1000 / 1000 < options.poison


class SimulatedHandler(JournaledHandler):
    """Takes a while, fails some attempts and then succeeds. Sometimes it takes far too long and ignores its
    cancellation. Every start and end is written to the journal.
    """

    def __init__(self, process, fleet, budget):
        super().__init__(process, fleet, budget)
        self._network = fleet.network
        self._options = fleet.options
        self._random = fleet.random
        self.tokens = {}
        """The fence tokens of the shards that this process owns."""
        if fleet.options.paused_starts:
            self.before_call = self._pause_sometimes

    async def _work(self, given, context):
        await self._simulate_work([given] if isinstance(given, Record) else given.records, context.attempt)

    async def handle_in_loop(self, records):
        """The body of an `async for` loop."""
        await self.work(records, self.begin(records))

    def begin(self, records):
        """Tells the journal that the records start. Call `work` or `work_until_done` next."""
        return self._start(records, self.tokens[records[0].shard_id])

    async def work(self, records, calls):
        await self._end(calls, self._try(records))

    async def work_until_done(self, records, calls):
        """Retries by itself, as a caller with manual acknowledgement does. To the engine this is one call."""
        await self._end(calls, self._try_until_done(records))

    async def _try_until_done(self, records):
        while True:
            try:
                return await self._try(records)
            except SimulatedError:
                """Try again."""

    async def _try(self, records):
        # An error ends the loop and with it the process, so only few records fail, once or twice each.
        data = records[0].data
        tries = self._fleet.tries
        tried = tries[data] = tries.get(data, 0) + 1
        await self._simulate_work(records, tried if crc32(data) % 7 == 0 else tried + 2)

    async def _pause_sometimes(self):
        if not self._network.is_calm and self._random.random() < self._options.paused_starts:
            _WAS_PAUSED.set(True)
            self._process.pause(self._random.uniform(1, 25))
            await asyncio.sleep(0)

    def decode(self, data):
        if not self._network.is_calm and crc32(data) % 1000 / 1000 < self._options.undecodable:
            raise SimulatedError("a simulated failure")
        if self._is_loop and is_poison(data, self._options):
            raise SimulatedError("poison")
        return data

    @property
    def _is_loop(self):
        return self._options.consume_mode not in {"run", "run_batches"}

    def _was_paused(self):
        was_paused = _WAS_PAUSED.get()
        _WAS_PAUSED.set(False)
        return was_paused

    # the simulated work

    async def _simulate_work(self, records, attempt):
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

    async def _take(self, seconds):
        if seconds > 0:
            await self._sleep(seconds)

    async def _overrun(self):
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

    async def _sleep(self, seconds):
        clock = self._process.clock
        await clock.sleep_until_ms(clock.now_ms() + int(seconds * 1000))


def simulated_budget(options):
    if not options.budget_bytes:
        return Budget()
    budget = Budget(READ_RESERVE_BYTES + options.budget_bytes)
    budget.tip_reserve_bytes = options.tip_reserve_bytes or READ_RESERVE_BYTES
    budget.overdraft_bytes_max = _OVERDRAFT_BYTES_MAX
    return budget


def registered_handler(options):
    """The handler is that of each worker; `simulate` passes its caller's."""
    policy = Retry(
        attempts=_ATTEMPTS if not options.poison else _ATTEMPTS_AT_POISON,
        timeout=options.timeout_seconds or None,
        then=_THEN[options.then],
    )
    handler_options = HandlerOptions(order=options.order, concurrency=options.concurrency, decode=None, policy=policy)
    return RegisteredHandler(None, _BATCHES if options.consume_mode == "run_batches" else None, handler_options)


class HarshWorker(SimulatedWorker):
    @property
    def is_at_work(self):
        return self.has_joined and self.process.is_alive and not self.task.done()

    def _make_handler(self):
        return SimulatedHandler(self.process, self._fleet, self._budget)

    def _plan(self, timing):
        options, plan = self._fleet.options, super()._plan(timing)
        worker_id = "billing" if options.same_worker_id else plan.profile.worker_id
        return replace(
            plan,
            profile=msgspec.structs.replace(plan.profile, worker_id=worker_id),
            fanout=FanOutPlan(app=APP) if options.read == "fanout" else None,
            stop_conditions=StopConditions(at_tip=options.ends_at_tip),
            settings=ConsumerSettings(
                checkpoints=CheckpointSettings(interval=options.checkpoint_seconds),
                leases=LeaseSettings(hand_off=options.hand_off, drain_deadline=options.drain_seconds),
            ),
        )

    def _engine_mode(self):
        match self._fleet.options.consume_mode:
            case "batches":
                return EngineMode(batches=_BATCHES)
            case "records" | "manual_ack" as mode:
                return EngineMode(manual_ack=mode == "manual_ack")
            case _:
                return super()._engine_mode()

    def _handler_options(self):
        options, given = self._fleet.options, super()._handler_options()
        decode = self._handler.decode if options.undecodable or options.poison else None
        return HandlerOptions(order=given.order, concurrency=given.concurrency, decode=decode, policy=given.policy)

    def _on_event(self, event):
        super()._on_event(event)
        stream, shard_id = self._fleet.stream, event.shard_id
        if isinstance(event, StreamChanged):
            stream.changes_reported += 1
        elif isinstance(event, LeaseTaken):
            self._handler.tokens[shard_id] = event.fence_token
        elif isinstance(event, LeaseLost):
            for incarnation in range(1, stream.incarnation + 1):
                name = facts.incarnation_name(shard_id, incarnation)
                self._journal.tell(facts.LeaseLossReported(self.process.name, name))
        elif isinstance(event, DataLost) and shard_id is not None:
            stream.excuse(shard_id, event.read_through_seconds)

    def _report_unexplained(self, error):
        if isinstance(error, SimulatedError):
            # The loop's body failed on purpose, and the fleet restarts the process.
            error = error.__context__
            if not isinstance(error, AnabranchError):
                return
        super()._report_unexplained(error)

    def _explained_errors(self):
        fleet, expected = self._fleet, super()._explained_errors()
        if fleet.rows.has_lost_streams:
            expected += (LeaseStoreInvalidError,)
        if fleet.stream.incarnation > 0 or not fleet.stream.exists:
            expected += (StreamError, StreamNotFoundError)
        return expected

    # loops

    async def _consume(self):
        loops = {"records": self._each_record, "batches": self._each_batch, "manual_ack": self._manual_ack}
        if (loop := loops.get(self._fleet.options.consume_mode)) is None:
            await super()._consume()
            return
        try:
            await loop()
        finally:  # as leaving `async with Consumer` does, with the error that is being raised, if any
            await self._consumer_run.leave(sys.exception(), _DRAIN_SECONDS)

    async def _each_record(self):
        async with aclosing(self._consumer_run.records()) as records:
            async for record in records:
                await self._handler.handle_in_loop([record])

    async def _each_batch(self):
        async with aclosing(self._consumer_run.batches()) as batches:
            async for batch in batches:
                await self._handler.handle_in_loop(batch.records)

    async def _manual_ack(self):
        slots = asyncio.Semaphore(_MANUAL_ACK_TASKS)
        async with asyncio.TaskGroup() as group, aclosing(self._consumer_run.records()) as records:
            async for record in records:
                # Begin in the step that hands the record out: after a wait, the fence may have passed.
                group.create_task(self._acknowledge(record, self._handler.begin([record]), slots))
                await slots.acquire()

    async def _acknowledge(self, record, calls, slots):
        try:
            await self._handler.work_until_done([record], calls)
            self._consumer_run.ack([record])
        finally:
            slots.release()
