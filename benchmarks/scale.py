"""What a poll and a commit cost as the shards of one worker grow: 10, 100, 1,000 and 5,000 of them.

The whole consumer runs in virtual time, with a stream and a lease store in memory. So nothing waits, nothing is ever
late, and the CPU time is what the engine costs, without sockets and codecs. Idle: a poll without records. Record: each
shard gets one record a second, which is polled, handled and, for this figure, almost never committed. Commit: what it
costs more if each record is committed. Busy: both. A cost that grows with the number of shards shows as a ratio above
1. The time of the garbage collector is part of all of them, and is shown beside them.
"""

# ruff: noqa: ARG002 -- the stream in memory has the arguments of the port

import asyncio
import gc
import random
import time
from collections.abc import Callable
from math import ceil

import measure as figures
from anabranch._core.handling.batches import BatchLimits
from anabranch._core.leases.machine import MemberProfile
from anabranch._core.leases.timing import lease_timing
from anabranch._core.reading.pace import PaceLimits
from anabranch._engine.consumer_run import ConsumerRun, EngineMode, RunPlan
from anabranch._engine.handler_calls import HandlerCall, HandlerOptions
from anabranch._model.hash_keys import HASH_KEY_MAX, HashKeyRange
from anabranch._model.leases import AppRow
from anabranch._model.streams import Shard, parse_stream
from anabranch._ports import Ports
from anabranch._wire.messages import GetRecordsResponse, KinesisRecord, ListShardsResponse, StreamSummary
from anabranch.budget import Budget
from anabranch.config import CheckpointSettings, ConsumerSettings
from anabranch.policies import Retry
from anabranch.stores.memory import MemoryLeaseStore
from anabranch.testing import loop as simulation

SHARDS = (10, 100, 1_000, 5_000)
SETTLE_SECONDS = 30.0
POLLS = 30_000
"""Polls that are measured, whatever the number of shards."""
ROUNDS = 3
"""The smallest figure of each counts: others show what else ran on the machine."""
RATIO_MAX = 1.3
"""The target for the cost at 5,000 shards divided by that at 100."""
BEGAN_MS = 1_700_000_000_000
DATA = b"x" * 100
NO_PACE = PaceLimits(share=50)
PACE = PaceLimits(idle_interval_ms=1000)
SELDOM_SECONDS = 300.0
"""The longest interval between commits."""


def run_with(
    ports: Ports,
    stream: str,
    mode,
    order: str = "shard",
    *,
    pace: PaceLimits = NO_PACE,
    start: str = "trim_horizon",
    commit_seconds: float | None = None,
) -> ConsumerRun:
    plan = RunPlan(
        app=AppRow(app="bench", app_id="bench", created_wall_ms=ports.clock.wall_ms()),
        streams=(parse_stream(stream),),
        start=start,
        profile=MemberProfile(worker_id="bench"),
        timing=lease_timing(10_000),
        pace=pace,
        settings=ConsumerSettings(checkpoints=CheckpointSettings(interval=commit_seconds)),
    )
    options = HandlerOptions(order=order, concurrency=32, decode=None, policy=Retry())
    return ConsumerRun(ports, plan, mode, options, Budget())


class VirtualClock:
    """The clock of the simulated loop."""

    def now_ms(self) -> int:
        return round(asyncio.get_running_loop().time() * 1000)

    def wall_ms(self) -> int:
        return BEGAN_MS + self.now_ms()

    def is_before(self, at_ms: int, wall_ahead_ms_max: int) -> bool:
        now_ms = self.now_ms()
        return now_ms < at_ms and self.wall_ms() - now_ms <= wall_ahead_ms_max

    async def sleep_until_ms(self, at_ms: int) -> None:
        await asyncio.sleep(max(0, at_ms - self.now_ms()) / 1000)

    def call_at_ms(self, at_ms: int, callback: Callable[[], None]) -> asyncio.TimerHandle:
        return asyncio.get_running_loop().call_later(max(0, at_ms - self.now_ms()) / 1000, callback)


class Stream:
    """Answers reads from memory. Each shard gets a record a second, or none."""

    def __init__(self, shard_count: int, clock: VirtualClock, *, busy: bool) -> None:
        self._clock = clock
        self._busy = busy
        width = (HASH_KEY_MAX + 1) // shard_count
        self.shards = tuple(
            Shard(
                shard_id=f"shardId-{number:012}",
                hash_key_range=HashKeyRange(
                    number * width, HASH_KEY_MAX if number == shard_count - 1 else (number + 1) * width - 1
                ),
                starting_sequence_number=1,
            )
            for number in range(shard_count)
        )
        self.polls = 0

    async def get_shard_iterator(self, stream, shard_id, position):
        return f"{shard_id} {self._now()}"

    async def get_records(self, stream, shard_iterator, *, limit=None, has_room=None):
        self.polls += 1
        shard_id, since = shard_iterator.split()
        now = self._now()
        records = []
        if self._busy:
            records = [
                KinesisRecord(
                    data=b"x" * 100, partition_key=shard_id, sequence_number=str(second), arrival_seconds=second
                )
                for second in range(int(since) + 1, now + 1)
            ]
        return GetRecordsResponse(records, f"{shard_id} {now}", 0, (), self._clock.wall_ms() / 1000)

    async def list_shards(self, stream, *, shard_filter=None, next_token=None):
        return ListShardsResponse(self.shards)

    async def describe_stream_summary(self, stream):
        return StreamSummary(
            name="orders",
            arn="arn:aws:kinesis:us-east-1:123456789012:stream/orders",
            status="ACTIVE",
            created_seconds=BEGAN_MS / 1000 - 1,
            retention_hours=24,
            open_shard_count=len(self.shards),
            server_seconds=self._clock.wall_ms() / 1000,
        )

    def _now(self) -> int:
        return self._clock.wall_ms() // 1000


class CollectorTime:
    """CPU seconds of the garbage collector, while it is among its callbacks."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._began = 0.0

    def __call__(self, phase: str, _info: dict[str, int]) -> None:
        now = time.process_time()
        if phase == "start":
            self._began = now
        else:
            self.seconds += now - self._began


def measure(shard_count: int, *, busy: bool, commit_seconds: float | None = None) -> tuple[float, float]:
    """Microseconds of CPU for each poll, or for each record if it is busy; and how many of them the collector took."""

    async def main() -> tuple[float, float]:
        clock = VirtualClock()
        stream = Stream(shard_count, clock, busy=busy)
        handled = 0

        async def handle(batch):
            nonlocal handled
            handled += len(batch)

        ports = Ports(
            kinesis=stream,  # type: ignore[arg-type]
            store=MemoryLeaseStore(),
            clock=clock,
            entropy=random.Random(1),
            emit=lambda _: None,
        )
        mode = EngineMode(HandlerCall(handle, threads=1), BatchLimits(max_wait_ms=0))
        run = run_with(ports, "orders", mode, pace=PACE, start="latest", commit_seconds=commit_seconds)
        await run.start()
        while len(run.sessions) < shard_count:  # noqa: ASYNC110 -- virtual time
            await asyncio.sleep(1.0)
        await asyncio.sleep(SETTLE_SECONDS)
        gc.collect()
        collector = CollectorTime()
        gc.callbacks.append(collector)
        polls, records, start = stream.polls, handled, time.process_time()
        await asyncio.sleep(ceil(POLLS / shard_count))
        taken, polls, records = time.process_time() - start, stream.polls - polls, handled - records
        gc.callbacks.remove(collector)
        await run.stop(5)
        count = records if busy else polls
        return taken / count * 1e6, collector.seconds / count * 1e6

    return simulation.run(main)


def main() -> None:
    costs: dict[str, dict[int, tuple[float, float]]] = {"idle": {}, "record": {}, "busy": {}}
    for _ in range(ROUNDS):
        for count in SHARDS:
            for name, cost in (
                ("idle", measure(count, busy=False)),
                ("record", measure(count, busy=True, commit_seconds=SELDOM_SECONDS)),
                ("busy", measure(count, busy=True)),
            ):
                costs[name][count] = min(cost, costs[name].get(count, cost))
    print("microseconds, and in brackets those of the garbage collector; one record a second and shard")
    print(f"{'shards':>8} {'idle poll':>16} {'poll with record':>18} {'commit':>8} {'busy: both':>16}")
    for count in SHARDS:
        idle, record, busy = (f"{cost[count][0]:.1f} ({cost[count][1]:.1f})" for cost in costs.values())
        commit = costs["busy"][count][0] - costs["record"][count][0]
        print(f"{count:>8} {idle:>16} {record:>18} {commit:>8.1f} {busy:>16}")
    for name, cost in costs.items():
        ratio = cost[5_000][0] / cost[100][0]
        verdict = figures.target(f"{name} shards: 5,000 / 100 of them", ratio, RATIO_MAX, at_least=False)
        print(f"{name}: 5,000 shards cost {ratio:.2f} times as much per shard as 100; {verdict}")


if __name__ == "__main__":
    main()
