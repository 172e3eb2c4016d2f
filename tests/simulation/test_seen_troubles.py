"""Every problem is reported with its reason and a true lag in every view, and an event reports its end.

One table: a fleet of two workers on the local server, in virtual time, and one trouble after another. Where somebody
looks is `Consumer.status()`, `Application.status()`, `top`, `explain`, `/status.json` and the log.
"""

import asyncio
import io
import json
import logging
from dataclasses import dataclass, replace

import pytest
from rich.console import Console

from anabranch import Application, Retry
from anabranch._cli.explain import explain_fleet, explain_shard
from anabranch._cli.fleet_tables import fleet_lines, headline
from anabranch._cli.options import ago
from anabranch._core.session import Session
from anabranch.errors import LeaseStoreError
from anabranch.health import HealthApp
from anabranch.logs import JsonFormatter
from anabranch.reasons import WorkersFull
from anabranch.stores.memory import MemoryLeaseStore

from simulated_stream import _CLOCK, QUICK, run, stream_world, until

FIRST, SECOND = "shardId-000000000000", "shardId-000000000001"
STATUS_AGE_MAX = 7.0
"""Workers write their status every five seconds while somebody looks."""


class Store(MemoryLeaseStore):
    """Can be stopped."""

    is_stopped = False

    def __getattribute__(self, name):
        found = super().__getattribute__(name)
        if name.startswith("_") or not asyncio.iscoroutinefunction(found):
            return found

        async def call(*arguments, **options):
            if self.is_stopped:
                raise LeaseStoreError("connection refused")
            return await found(*arguments, **options)

        return call


class Scene:
    """A fleet, what its handlers do, and all that can be seen of it."""

    def __init__(self, world):
        self.world, self.store, self.workers = world, Store(), {}
        self.seconds_per_record, self.stuck, self.poison = 0.0, {}, set()
        self.application = Application("billing", leases=self.store, clock=_CLOCK)
        self.out = io.StringIO()

    async def start(self, name, max_shards=None):
        settings = replace(QUICK, leases=replace(QUICK.leases, max_shards=max_shards))
        retry = Retry(attempts=2, backoff=0.1)
        consumer = self.world.consumer(
            app="billing", leases=self.store, order="key", on_failure=retry, settings=settings
        )
        self.workers[name] = (consumer, asyncio.create_task(consumer.run(self.handle)))
        await until(lambda: consumer.status().member_id is not None, f"{name} to join")

    async def handle(self, record):
        key = record.partition_key
        if key in self.poison:
            raise ValueError("no such customer")
        if key in self.stuck:
            await self.stuck[key].wait()
        await asyncio.sleep(self.seconds_per_record)

    async def put(self, key, count=1):
        """Writes records, and returns when that was."""
        self.world.put([key] * count)
        return _CLOCK.wall_ms() / 1000

    def key_in(self, shard_id, letter):
        """A key that belongs to the shard."""
        for number in range(1_000):
            self.world.call("PutRecord", PartitionKey=(key := f"{letter}{number}"), Data=b"-1")
            if self.world.call("PutRecord", PartitionKey=key, Data=b"-1")["ShardId"] == shard_id:
                return key
        raise AssertionError("no key")

    def states(self):
        """What the workers themselves say of each shard."""
        return {state.shard_id: state for consumer, _ in self.workers.values() for state in consumer.status().shards}

    def served(self, path):
        """The answer of the health port."""
        answer = HealthApp(*(consumer for consumer, _ in self.workers.values())).answer(path)
        return answer.status, json.loads(answer.body)

    def served_shard(self, shard_id):
        """The shard in `/status.json`."""
        status, workers = self.served("/status.json")
        assert status == 200
        shards = [shard for worker in workers for shard in worker["status"]["shards"]]
        return next(shard for shard in shards if shard["shard_id"] == shard_id)

    def is_well(self):
        found = self.states().values()
        return bool(found) and all(state.lag is not None and state.lag < 1 and not state.reason for state in found)

    def owner_of(self, shard_id):
        """The name of the worker."""
        owners = {
            state.shard_id: name
            for name, (consumer, _) in self.workers.items()
            for state in consumer.status().shards
        }  # fmt: skip
        return owners[shard_id]

    async def kill(self, name):
        consumer, task = self.workers.pop(name)
        await consumer._consumer_run.cancel()
        await asyncio.gather(task, return_exceptions=True)

    async def stop(self):
        for consumer, task in self.workers.values():
            await consumer.stop()
            await asyncio.gather(task, return_exceptions=True)

    # what is seen

    async def look(self):
        """The fleet as `Application` sees it, after it has watched for a while."""
        for _ in range(4):
            await self.application.status()
            await asyncio.sleep(2)
        return await self.application.status(watch=True)

    def lines(self):
        return [json.loads(line) for line in self.out.getvalue().splitlines()]

    def logged(self, event, shard_id=None):
        return [
            line for line in self.lines() if line["event"] == event and shard_id in {None, line.get("shard_id")}
        ]  # fmt: skip


def top(status):
    """What `top` prints, by its first word."""
    console = Console(width=250, file=io.StringIO())
    lines = [headline(status), *(line.plain for line in fleet_lines(status, console))]
    return "\n".join(lines)


def line_of(text, shard_id):
    return next(line for line in text.splitlines() if line.startswith(shard_id))


@dataclass
class Trouble:
    """One row of the table."""

    shard_id: str = FIRST
    state: str = "stalled"
    """In the fleet's status."""
    reason: str | None = None
    """Its code; None if the shard moves."""
    seconds: float = 40.0
    """How long it lasts before somebody looks."""
    over: tuple[str, str] = ("ShardRecovered", "reading again after")
    """The event, and words of the line, that say that it is over."""
    max_shards: int | None = None
    """For each worker."""

    async def begin(self, scene):
        """Returns since when the oldest record is unfinished, in seconds since 1970."""
        raise NotImplementedError

    async def end(self, scene):
        raise NotImplementedError

    def check_worker(self, scene, since):
        """`Consumer.status()` and `/status.json`."""
        own = scene.states()[self.shard_id]
        assert own.lag == pytest.approx(_CLOCK.wall_ms() / 1000 - since, abs=2)
        assert self.reason == (None if own.reason is None else own.reason.code)
        served = scene.served_shard(self.shard_id)
        assert (served["lag"], (served["reason"] or {}).get("code")) == (own.lag, self.reason)
        assert scene.served("/live")[0] == 200

    async def check_fleet(self, scene, since):
        """`Application.status()`, `top` and `explain`."""
        status = await scene.look()
        true_lag = _CLOCK.wall_ms() / 1000 - since
        shard = next(shard for shard in status.shards if shard.shard_id == self.shard_id)
        assert (shard.state, None if shard.reason is None else shard.reason.code) == (self.state, self.reason)
        assert true_lag - STATUS_AGE_MAX < shard.lag < true_lag + 2
        assert status.lag == pytest.approx(shard.lag, abs=STATUS_AGE_MAX)
        check_texts(status, shard, self)

    def check_log(self, scene):
        assert [line["reason"] for line in scene.logged("ShardStalled", self.shard_id)][-1:] == [self.reason]

    async def check_over(self, scene):
        event, words = self.over
        await until(lambda: any(words in line["message"] for line in scene.logged(event)), f"a line with {words}", 130)


@dataclass
class SlowHandler(Trouble):
    state: str = "reading"
    seconds: float = 65.0
    over: tuple[str, str] = ("ConsumerProgress", "0.0 s behind")

    async def begin(self, scene):
        key = scene.key_in(FIRST, "slow")
        await asyncio.sleep(2)
        scene.seconds_per_record = 1.0
        return await scene.put(key, 300)

    async def end(self, scene):
        scene.seconds_per_record = 0.0

    def check_log(self, scene):
        assert any(line["lag"] > 30 and FIRST in line["worst_shard"] for line in scene.logged("ConsumerProgress"))


@dataclass
class StuckHandler(Trouble):
    reason: str = "record-in-handler"

    async def begin(self, scene):
        key = scene.key_in(self.shard_id, "stuck")
        await asyncio.sleep(2)
        scene.stuck[key] = asyncio.Event()
        return await scene.put(key)

    async def end(self, scene):
        for event in scene.stuck.values():
            event.set()


@dataclass
class Split(StuckHandler):
    over: tuple[str, str] = ("ShardFinished", "children: shardId-000000000002, shardId-000000000003")

    async def begin(self, scene):
        since = await super().begin(scene)
        scene.world.split(FIRST)
        return since


@dataclass
class Merge(StuckHandler):
    """The child has a lease as soon as one parent is finished, and waits for the other."""

    over: tuple[str, str] = ("ShardFinished", "children: shardId-000000000002")

    async def begin(self, scene):
        since = await super().begin(scene)
        scene.world.merge()
        return since


@dataclass
class Throttled(Trouble):
    reason: str = "reads-throttled"
    over: tuple[str, str] = ("ReadRecovered", "read again, after")

    async def begin(self, scene):
        key = scene.key_in(FIRST, "throttled")
        await asyncio.sleep(2)
        scene.world.kinesis.faults.on("GetRecords").throttle()
        return await scene.put(key)

    async def end(self, scene):
        scene.world.kinesis.faults.clear()


@dataclass
class Poison(Trouble):
    state: str = "stopped"
    reason: str = "stopped-by-handler"
    over: tuple[str, str] = ("ShardStarted", "is tried again")

    async def begin(self, scene):
        key = scene.key_in(FIRST, "poison")
        await asyncio.sleep(2)
        scene.poison.add(key)
        return await scene.put(key)

    async def end(self, scene):
        """The handler is fixed and the workers are started again, one after the other."""
        scene.poison.clear()
        for name, (consumer, task) in list(scene.workers.items()):
            await consumer.stop()
            await task
            await scene.start(name)

    def check_log(self, scene):
        assert [line["reason"] for line in scene.logged("ShardStopped", self.shard_id)] == [self.reason]


@dataclass
class StoreAway(Trouble):
    """Nobody can look at the fleet meanwhile: viewers say what is wrong."""

    reason: str = "store-unreachable"
    seconds: float = 60.0

    async def begin(self, scene):
        key = scene.key_in(FIRST, "late")
        await asyncio.sleep(2)
        scene.store.is_stopped = True
        await until(lambda: all(one.status().fenced for one, _ in scene.workers.values()), "the fence")
        return await scene.put(key)

    async def end(self, scene):
        scene.store.is_stopped = False

    def check_worker(self, scene, since):
        super().check_worker(scene, since)
        status, ready = scene.served("/ready")
        assert (status, ready["ready"]) == (503, False)
        assert "no heartbeat was acknowledged in time: connection refused" in ready["reasons"]

    async def check_fleet(self, scene, since):
        with pytest.raises(LeaseStoreError, match="connection refused"):
            await scene.application.status()

    def check_log(self, scene):
        super().check_log(scene)
        assert len(scene.logged("StoreUnanswered")) == 2  # each worker says it once

    async def check_over(self, scene):
        await super().check_over(scene)
        await until(lambda: len(scene.logged("StoreAnswered")) == 2, "both to say so")
        assert all(55 < line["seconds"] < 75 for line in scene.logged("StoreAnswered"))
        assert scene.served("/ready")[0] == 200


@dataclass
class KilledWorker(StuckHandler):
    """The other worker takes the shard over, and is stuck at the same record."""

    async def begin(self, scene):
        since = await super().begin(scene)
        await until(lambda: scene.logged("ShardStalled", self.shard_id), "the stall")
        await scene.kill(scene.owner_of(self.shard_id))
        return since

    def check_log(self, scene):
        super().check_log(scene)
        assert "missed its heartbeats: declared dead" in scene.logged("MemberEvicted")[0]["message"]
        assert len(scene.logged("ShardStarted", self.shard_id)) == 2


@dataclass
class KilledWithoutSuccessor(KilledWorker):
    """The other worker has no room for the shard."""

    state: str = "unowned"
    reason: str = "workers-full"
    over: tuple[str, str] = ("ShardRecovered", f"it was stalled: {WorkersFull()}")
    max_shards: int | None = 1

    async def end(self, scene):
        await super().end(scene)
        await scene.start("three", max_shards=1)

    def check_worker(self, scene, since):
        """The survivor says nothing of a shard that it does not hold."""
        assert list(scene.states()) == [SECOND]
        assert scene.served("/live")[0] == 200

    def check_log(self, scene):
        Trouble.check_log(self, scene)
        assert "missed its heartbeats: declared dead" in scene.logged("MemberEvicted")[0]["message"]


@dataclass
class AllKilled(KilledWorker):
    """Nobody is left to say anything: the rows of the store tell it."""

    state: str = "orphaned"
    reason: str = "worker-silent"
    over: tuple[str, str] = ("MemberEvicted", "missed its heartbeats: declared dead")

    async def begin(self, scene):
        since = await super().begin(scene)
        for name in list(scene.workers):
            await scene.kill(name)
        return since

    async def end(self, scene):
        await super().end(scene)
        await scene.start("three")

    def check_worker(self, scene, since):
        assert scene.workers == {}

    def check_log(self, scene):
        assert [line["reason"] for line in scene.logged("ShardStalled", self.shard_id)] == ["record-in-handler"]


TROUBLES = {
    "slow handler": SlowHandler(),
    "stuck handler": StuckHandler(),
    "split": Split(),
    "merge": Merge(),
    "throttled": Throttled(),
    "poison record": Poison(),
    "store away": StoreAway(),
    "killed worker": KilledWorker(),
    "killed worker without a successor": KilledWithoutSuccessor(),
    "all workers killed": AllKilled(),
}


@pytest.fixture
def log():
    handler, logger = logging.StreamHandler(io.StringIO()), logging.getLogger("anabranch")
    handler.setFormatter(JsonFormatter())
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield handler
    logger.removeHandler(handler)
    logger.setLevel(logging.NOTSET)


async def fleet(world, log, max_shards=None):
    scene = Scene(world)
    scene.out = log.stream
    await scene.start("one", max_shards)
    await scene.start("two", max_shards)
    await until(lambda: len(scene.states()) == 2 and scene.is_well(), "the fleet to be well")
    return scene


@pytest.mark.parametrize("trouble", TROUBLES.values(), ids=TROUBLES.keys())
def test_a_problem_is_named_with_a_true_lag_and_its_end_is_reported(trouble, log):
    async def main():
        async with stream_world(2) as world:
            scene = await fleet(world, log, trouble.max_shards)
            since = await trouble.begin(scene)
            await asyncio.sleep(trouble.seconds)
            trouble.check_worker(scene, since)
            await trouble.check_fleet(scene, since)
            trouble.check_log(scene)

            await trouble.end(scene)
            await until(scene.is_well, "the end of the trouble", 120)
            await trouble.check_over(scene)
            status = await scene.look()
            assert {shard.state for shard in status.unfinished_shards} == {"reading"}
            assert status.lag < 1
            await scene.stop()

    run(main, seconds=10_000)


def check_texts(status, shard, trouble):
    """`top` and `explain` say the same, in words."""
    shown = top(status)
    assert f"{ago(status.lag)} behind" in shown.splitlines()[0]
    assert ago(shard.lag) in line_of(shown, shard.shard_id)
    assert trouble.state in line_of(shown, shard.shard_id)
    explained = explain_shard(shard, status)
    text = " ".join(explained.situation)
    assert f"it is {ago(shard.lag)} behind" in text
    if trouble.reason is not None:
        reason = shard.reason.text.partition(" (")[0][:40]
        assert reason in " ".join(shown.split())
        assert reason.lower() in text.lower()
        assert explained.advice == shard.reason.advice
        assert "1 of" in " ".join(explain_fleet(status)) or "2 of" in " ".join(explain_fleet(status))


def test_a_child_that_waits_for_a_parent_says_for_which(log):
    async def main():
        async with stream_world(2) as world:
            scene, trouble = await fleet(world, log), TROUBLES["merge"]
            await trouble.begin(scene)
            await asyncio.sleep(30)
            status = await scene.look()
            child = next(shard for shard in status.shards if shard.shard_id == "shardId-000000000002")
            assert (child.state, child.reason.code, child.waits_for) == ("waiting", "waits-for-parents", (FIRST,))
            text = " ".join(explain_shard(child, status).situation)
            assert f"it waits for its parents: {FIRST} is stalled" in text
            assert "behind)" in text
            await trouble.end(scene)
            await until(scene.is_well, "the end", 60)
            assert scene.logged("ShardStarted", "shardId-000000000002")
            await scene.stop()

    run(main, seconds=10_000)


def test_a_lag_that_only_looks_at_reads_is_caught_by_the_table(log, monkeypatch):
    """As it was: a slow handler with old records in its window showed no lag."""
    monkeypatch.setattr(
        Session, "lag_seconds", lambda self, now: None if self.behind_ms is None else self.behind_ms / 1000
    )
    with pytest.raises(AssertionError, match="comparison failed"):
        test_a_problem_is_named_with_a_true_lag_and_its_end_is_reported(TROUBLES["slow handler"], log)
