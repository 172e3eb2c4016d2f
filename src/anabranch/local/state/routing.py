"""Which open shard takes a hash key: the starts of the open ranges in order, searched by halves.

Rebuilt whenever a shard opens or closes. The open ranges cover the hash space exactly once, so every key has its shard.
"""

from bisect import bisect_right
from collections.abc import Iterable

from anabranch.local.state.shard import Shard

__all__ = ["Routing"]


class Routing:
    __slots__ = ("_starts", "open_shards")

    def __init__(self, shards: Iterable[Shard] = ()) -> None:
        self.open_shards = sorted((shard for shard in shards if shard.is_open), key=lambda s: s.hash_key_range.start)
        """By hash key."""
        self._starts = [shard.hash_key_range.start for shard in self.open_shards]

    def shard_for(self, hash_key: int) -> Shard:
        return self.open_shards[bisect_right(self._starts, hash_key) - 1]

    def neighbours(self, start: int, end: int) -> list[Shard]:
        """The open shards that lie within a range of hash keys, in order."""
        return [s for s in self.open_shards if start <= s.hash_key_range.start and s.hash_key_range.end <= end]
