"""A local Kinesis with one stream, for tests that read it over real sockets: write, split, merge, and consume."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable
from contextlib import asynccontextmanager
from typing import Any

from anabranch import Aws, Consumer, ConsumerSettings, LeaseSettings, PollingSettings
from anabranch.events import Event
from anabranch.local import LocalKinesis
from anabranch.records import Record
from patience import PATIENCE

QUICK = ConsumerSettings(
    leases=LeaseSettings(expiry=3.0, drain_deadline=5.0, stall_limit=60.0),
    polling=PollingSettings(idle_interval=0.2, listing_interval=1.0),
)
HALF = str(1 << 127)


class StreamWorld:
    def __init__(self, kinesis: LocalKinesis, stream: str) -> None:
        self.kinesis = kinesis
        self.stream = stream
        self.put_count = 0

    @property
    def aws(self) -> Aws:
        return Aws(region=self.kinesis.region, endpoint_url=self.kinesis.endpoint_url, credentials=Credentials())

    def call(self, operation: str, **request: Any) -> dict[str, Any]:
        return self.kinesis.state.call(operation, {"StreamName": self.stream, **request}, now_ms=now_ms())

    def put(self, keys: Iterable[str]) -> None:
        """One record a key; its data is a number that only grows, so that order can be told from it."""
        for key in keys:
            self.call("PutRecord", PartitionKey=key, Data=str(self.put_count).encode())
            self.put_count += 1

    def put_payloads(self, *payloads: bytes, key: str | None = None) -> list[str]:
        """One record a payload, each with a key of its own or all with this one; their sequence numbers."""
        return [
            self.call("PutRecord", PartitionKey=key or f"key-{number}", Data=data)["SequenceNumber"]
            for number, data in enumerate(payloads)
        ]

    def shards(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.call("ListShards")["Shards"]
        return found

    def open_shards(self) -> list[dict[str, Any]]:
        return [shard for shard in self.shards() if "EndingSequenceNumber" not in shard["SequenceNumberRange"]]

    def split(self, shard_id: str | None = None) -> None:
        shards = {shard["ShardId"]: shard for shard in self.open_shards()}
        shard = shards[shard_id] if shard_id else next(iter(shards.values()))
        low, high = (int(shard["HashKeyRange"][end]) for end in ("StartingHashKey", "EndingHashKey"))
        self.call("SplitShard", ShardToSplit=shard["ShardId"], NewStartingHashKey=str((low + high) // 2))

    def merge(self) -> None:
        first, second = sorted(self.open_shards(), key=lambda shard: int(shard["HashKeyRange"]["StartingHashKey"]))[:2]
        self.call("MergeShards", ShardToMerge=first["ShardId"], AdjacentShardToMerge=second["ShardId"])

    def consumer(self, **options: Any) -> Consumer[Any]:
        return Consumer(self.stream, **{"aws": self.aws, "settings": QUICK, **options})


class Credentials:
    access_key, secret_key, token = "local", "local", None


@asynccontextmanager
async def stream_world(shards: int = 1, **options: Any) -> AsyncIterator[StreamWorld]:
    async with LocalKinesis(create={"orders": shards}, **options) as kinesis:
        yield StreamWorld(kinesis, "orders")


def now_ms() -> int:
    return time.time_ns() // 1_000_000


def run(main: Callable[[], Coroutine[Any, Any, None]]) -> None:
    async def limited() -> None:
        async with asyncio.timeout(1.5 * PATIENCE):
            await main()

    asyncio.run(limited())


async def until(condition: Callable[[], bool], what: str, seconds: float = PATIENCE) -> None:
    """Awaits a condition of another task; names it if it does not come."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + seconds
    while not condition():
        if loop.time() > deadline:
            raise TimeoutError(f"waited {seconds:.0f} s for: {what}")
        await asyncio.sleep(0.005)


def numbers(records: Iterable[Record[Any]]) -> list[int]:
    return [int(record.data) for record in records]


def kinds(happened: Iterable[Event], *types: type[Event]) -> list[Any]:
    """The events of these types."""
    return [event for event in happened if isinstance(event, types)]


def check_order(records: Iterable[Record[Any]]) -> None:
    last: dict[str, int] = {}
    for record in records:
        number = int(record.data)
        assert last.get(record.partition_key, -1) < number, f"{number} came after {last[record.partition_key]}"
        last[record.partition_key] = number
