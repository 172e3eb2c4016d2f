"""What can happen to subscriptions, over real sockets: HTTP/2 over TLS, against a local server whose time is scaled.

Each trouble strikes a stream of its own, all at the same time, while records are written. The worker lives, so nothing
is lost, nothing is repeated, keys keep their order, and the reason was named. The simulation has the same troubles in
virtual time. The reader's own times are not scaled: a dead connection takes thirty seconds.
"""

import asyncio
import time
import traceback
from collections.abc import Awaitable, Callable

import pytest

from anabranch import Budget, ConsumerSettings, FanOutSettings, reasons
from anabranch.events import SubscriptionEnded
from anabranch.local import LocalKinesis
from anabranch.local.errors import LocalError
from anabranch.stores.memory import MemoryLeaseStore

from stream_world import QUICK, StreamWorld, check_order, now_ms, numbers, until

pytestmark = [pytest.mark.long, pytest.mark.timeout(180)]

TIME_SCALE = 0.02
"""A subscription lasts six seconds, and an empty event comes every 0.1 s."""
SHARDS = 2
KEYS = [f"user-{n}" for n in range(16)]


class Worker:
    """A consumer of the world's stream, and everything that it reported."""

    def __init__(self, world: StreamWorld, app="billing", *, consumer_name=None, budget=256 << 20, handle=None):
        self.world, self.records, self.reasons, self.ended = world, [], set(), []
        self._handle = handle
        settings = ConsumerSettings(
            leases=QUICK.leases,
            polling=QUICK.polling,
            fanout=FanOutSettings(consumer_name=consumer_name),
            budget=budget,
        )
        self.consumer = world.consumer(
            app=app,
            leases=MemoryLeaseStore(),
            read="fanout",
            start="trim_horizon",
            settings=settings,
            on_event=self._on_event,
        )

    def _on_event(self, event):
        if isinstance(reason := getattr(event, "reason", None), reasons.Reason):
            self.reasons.add(type(reason))
        if isinstance(event, SubscriptionEnded):
            self.ended.append(event.error)

    async def handle(self, record):
        self.records.append(record)
        if self._handle is not None:
            await self._handle(record)

    async def __aenter__(self):
        self._running = asyncio.create_task(self.consumer.run(self.handle, handle_signals=False))
        await until(lambda: self.states == ["active"] * SHARDS, f"subscriptions, not {self.states}")
        return self

    async def __aexit__(self, kind, error, trace):
        await self.consumer.stop()
        await self._running

    @property
    def states(self):
        """Also notes what stands in the way."""
        shards = self.consumer.status().shards if not self._running.done() else []
        for shard in shards:
            found = shard.subscription.reason if shard.subscription else None
            self.reasons |= {type(reason) for reason in (shard.reason, found) if reason is not None}
        return [shard.subscription.state for shard in shards if shard.subscription]

    async def write_for(self, seconds):
        ends = time.monotonic() + seconds
        while time.monotonic() < ends:
            self.world.put(KEYS)
            await asyncio.sleep(0.1)
            _ = self.states

    async def check(self):
        await until(lambda: len(self.records) >= self.world.put_count, "all records")
        assert sorted(numbers(self.records)) == list(range(self.world.put_count))
        check_order(self.records)

    async def recovers(self, seconds=70):
        await until(
            lambda: self.states and set(self.states) == {"active"}, f"subscriptions, not {self.states}", seconds
        )


def consumer_arn(world: StreamWorld):
    arn = world.call("DescribeStreamSummary")["StreamDescriptionSummary"]["StreamARN"]
    (consumer,) = world.kinesis.state.call("ListStreamConsumers", {"StreamARN": arn}, now_ms=now_ms())["Consumers"]
    return consumer["ConsumerARN"]


def of_stream(world: StreamWorld):
    state = world.kinesis.state
    return [
        (shard_id, subscription)
        for (arn, shard_id), subscription in list(state.account.subscriptions.items())
        if f"stream/{world.stream}/" in arn
    ]


def cut(world: StreamWorld, error=None):
    """Ends the subscriptions that are open, so that the next ones meet the fault."""
    for shard_id, subscription in of_stream(world):
        subscription.end(error)
        world.kinesis.state.on_change(world.stream, shard_id)


async def struck(world: StreamWorld, add_fault, *, seconds, named):
    async with Worker(world) as worker:
        await worker.write_for(1)
        add_fault(world.kinesis.faults.on("SubscribeToShard", stream=world.stream))
        cut(world)
        await worker.write_for(seconds)
        for rule in world.kinesis.faults.rules:
            if rule.stream == world.stream:
                world.kinesis.faults.remove(rule)
        await worker.check()
        await worker.recovers()
        assert named in worker.reasons, worker.reasons
        await worker.check()


async def expiry(world):
    async with Worker(world) as worker:
        await worker.write_for(20)
        assert min(shard.subscription.renewal_count for shard in worker.consumer.status().shards) >= 2
        await worker.check()
        assert not worker.reasons


async def take_over(world):
    async with Worker(world) as worker:
        await worker.write_for(1)
        for shard in world.open_shards():
            request = {"ConsumerARN": consumer_arn(world), "ShardId": shard["ShardId"]}
            request["StartingPosition"] = {"Type": "LATEST"}
            world.kinesis.state.subscribe(request, now_ms=now_ms())
        await worker.write_for(4)
        await worker.recovers()
        await worker.check()
        assert reasons.SubscriptionTakenOver in worker.reasons


async def half_open(world):
    async with Worker(world) as worker:
        await worker.write_for(1)
        world.kinesis.faults.on("SubscribeToShard", stream=world.stream).fall_silent(events=1).at_most(SHARDS)
        cut(world)
        await worker.write_for(36)
        await worker.check()
        assert any("no event came for 30 s" in error for error in worker.ended), worker.ended


async def cut_inside_frames(world):
    await struck(world, lambda fault: fault.drop(events=2), seconds=15, named=reasons.SubscriptionFailing)


async def in_use(world):
    await struck(world, lambda fault: fault.resource_in_use(), seconds=8, named=reasons.SubscriptionInUse)


async def throttled(world):
    await struck(
        world,
        lambda fault: fault.error("LimitExceededException", "Rate exceeded"),
        seconds=8,
        named=reasons.SubscriptionFailing,
    )


async def key_throttled(world):
    async with Worker(world) as worker:
        await worker.write_for(1)
        cut(world, LocalError("KMSThrottlingException", "too many calls of the key"))
        await worker.write_for(4)
        await worker.recovers()
        await worker.check()
        assert reasons.SubscriptionFailing in worker.reasons


async def key_denied(world):
    async with Worker(world) as worker:
        await worker.write_for(1)
        cut(world, LocalError("KMSAccessDeniedException", "no access to the key"))
        await worker.write_for(4)
        await worker.recovers()
        await worker.check()
        assert reasons.StreamKeyDenied in worker.reasons


async def shard_end(world):
    async with Worker(world) as worker:
        await worker.write_for(1)
        world.split()
        await worker.write_for(1)
        world.merge()
        await worker.write_for(1)
        await worker.check()
        assert len(world.shards()) == SHARDS + 3


async def consumer_deleted(world):
    async with Worker(world) as worker:
        await worker.write_for(1)
        before = consumer_arn(world)
        world.kinesis.state.call("DeregisterStreamConsumer", {"ConsumerARN": before}, now_ms=now_ms())
        await worker.write_for(6)
        await worker.recovers()
        await worker.check()
        assert consumer_arn(world) != before
        assert reasons.ConsumerMissing in worker.reasons


async def one_name(world):
    async with (
        Worker(world, "one", consumer_name="shared") as one,
        Worker(world, "two", consumer_name="shared") as two,
    ):
        writing = asyncio.create_task(one.write_for(25))
        while not writing.done():
            _ = two.states
            await asyncio.sleep(0.05)
        await writing
        await one.check()
        await two.check()
        assert reasons.ConsumerNameShared in one.reasons | two.reasons


async def two_applications(world):
    async with Worker(world, "one") as one, Worker(world, "two") as two:
        await one.write_for(15)
        await one.check()
        await two.check()
        assert not one.reasons | two.reasons


async def full_budget(world):
    budget, gate, data = Budget(24 << 20), asyncio.Event(), bytes(900_000)

    async def wait(_record):
        await gate.wait()

    async with Worker(world, budget=budget, handle=wait) as worker:
        for number in range(60):
            half = str((number % SHARDS) << 127)
            world.call("PutRecord", PartitionKey=f"k{number % SHARDS}", ExplicitHashKey=half, Data=data)
            await asyncio.sleep(0)
        await until(lambda: worker.states == ["full"] * SHARDS, "closed subscriptions")
        await until(lambda: all(one.is_over for _, one in of_stream(world)), "their end at the server")
        await asyncio.sleep(10)
        gate.set()
        await until(lambda: len(worker.records) == 60, "all records")
        assert len({record.sequence_number for record in worker.records}) == 60
        assert budget.peak_bytes <= budget.limit_bytes


TROUBLES: dict[str, Callable[[StreamWorld], Awaitable[None]]] = {
    function.__name__: function
    for function in (
        expiry, take_over, half_open, cut_inside_frames, in_use, throttled, key_throttled, key_denied, shard_end,
        consumer_deleted, one_name, two_applications, full_budget,
    )
}  # fmt: skip


@pytest.fixture(scope="module")
def results():
    """What each trouble ended with: None, or the error."""

    async def meet(kinesis, name):
        try:
            async with asyncio.timeout(150):
                await TROUBLES[name](StreamWorld(kinesis, name))
        except Exception:  # noqa: BLE001 -- told by the test of this trouble
            return traceback.format_exc()

    async def main():
        async with LocalKinesis(create=dict.fromkeys(TROUBLES, SHARDS), tls=True, time_scale=TIME_SCALE) as kinesis:
            with pytest.MonkeyPatch.context() as patch:
                patch.setenv("AWS_CA_BUNDLE", str(kinesis.certificate_path))
                return await asyncio.gather(*(meet(kinesis, name) for name in TROUBLES))

    return dict(zip(TROUBLES, asyncio.run(main()), strict=True))


@pytest.mark.parametrize("trouble", TROUBLES)
def test_nothing_is_lost_or_repeated_and_the_reason_is_named(results, trouble):
    assert results[trouble] is None, results[trouble]
