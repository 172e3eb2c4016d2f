"""Records written all along, over sockets, by the product's own producer; and resharding at random beside it.

The data of a record is its number within its key, so that the writing order can be told from the records alone.
"""

import asyncio
import hashlib
import random
from collections import deque
from collections.abc import Sequence

from anabranch import Delivery, Producer
from anabranch.testing import Auditor

from stream_world import StreamWorld

HASH_KEYS = 1 << 128


def spread_keys(ranges: int, each: int) -> list[str]:
    """Keys such that every one of so many equal hash ranges has `each` of them."""
    found: list[list[str]] = [[] for _ in range(ranges)]
    number = 0
    while any(len(keys) < each for keys in found):
        key = f"k{number}"
        number += 1
        hash_key = int.from_bytes(hashlib.md5(key.encode()).digest())
        keys = found[hash_key * ranges // HASH_KEYS]
        if len(keys) < each:
            keys.append(key)
    return [key for keys in found for key in keys]


class Traffic:
    def __init__(self, world: StreamWorld, keys: Sequence[str], auditor: Auditor, *, aggregate: bool) -> None:
        self.keys = keys
        self.written_count = 0
        self._auditor = auditor
        self._numbers = dict.fromkeys(keys, 0)
        self._on_their_way: deque[Delivery] = deque()
        self._producer: Producer[bytes] = Producer(
            world.stream, aws=world.aws, linger=0.02, aggregate="shard" if aggregate else None
        )

    async def round(self, count: int = 1) -> None:
        """So many records of every key, delivered and told to the auditor."""
        items = []
        for _ in range(count):
            for key in self.keys:
                items.append((key, b"%d" % self._numbers[key]))
                self._numbers[key] += 1
        self._on_their_way.extend(await self._producer.put_many(items))
        await self._see_delivered()

    async def _see_delivered(self) -> None:
        while self._on_their_way:
            result = await self._on_their_way[0]
            self._on_their_way.popleft()
            assert result.delivered, result.error
            self._auditor.wrote(result)
            self.written_count += 1

    async def command(self, key: str, data: str) -> None:
        """One record that tells its handler what to do."""
        self._auditor.wrote(await self._producer.put_and_wait(data.encode(), key))

    async def steadily(self, interval_seconds: float, until_count: int | None = None) -> None:
        """A round every interval, as long as nobody cancels it or until so many are written."""
        loop = asyncio.get_running_loop()
        next_at = loop.time()
        while until_count is None or self.written_count < until_count:
            await self.round()
            next_at = max(next_at + interval_seconds, loop.time())
            await asyncio.sleep(next_at - loop.time())

    async def close(self) -> None:
        """Also what was on its way when the writing was cancelled is delivered, and told."""
        await self._see_delivered()
        await self._producer.close()


class Resharding:
    """Splits and merges at random, within bounds; between two of them the stream rests for a while."""

    def __init__(self, world: StreamWorld, chance: random.Random, *, shards_min: int, shards_max: int) -> None:
        self._world = world
        self._chance = chance
        self._bounds = (shards_min, shards_max)
        self.split_count = 0
        self.merge_count = 0

    def once(self) -> None:
        low, high = self._bounds
        shards = sorted(self._world.open_shards(), key=lambda shard: int(shard["HashKeyRange"]["StartingHashKey"]))
        if len(shards) <= low or (len(shards) < high and self._chance.random() < 0.5):
            self._world.split(self._chance.choice(shards)["ShardId"])
            self.split_count += 1
        else:
            place = self._chance.randrange(len(shards) - 1)
            self._world.call(
                "MergeShards",
                ShardToMerge=shards[place]["ShardId"],
                AdjacentShardToMerge=shards[place + 1]["ShardId"],
            )
            self.merge_count += 1

    async def steadily(self, seconds: tuple[float, float]) -> None:
        while True:
            await asyncio.sleep(self._chance.uniform(*seconds))
            self.once()
