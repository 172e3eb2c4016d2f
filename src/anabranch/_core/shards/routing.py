"""Which open shard holds a hash key: a sorted list of range starts and a bisection."""

from bisect import bisect_right
from collections.abc import Iterable

from anabranch._model.shards import Shard

__all__ = ["Routes"]


class Routes:
    """The open shards of one listing. A hash key that none of them holds has no route: the listing is out of date."""

    def __init__(self, shards: Iterable[Shard]) -> None:
        self._shards = sorted((shard for shard in shards if shard.is_open), key=lambda shard: shard.hash_key_range)
        self._starts = [shard.hash_key_range.start for shard in self._shards]

    def shard_of(self, hash_key: int) -> Shard | None:
        index = bisect_right(self._starts, hash_key) - 1
        if index < 0 or hash_key not in self._shards[index].hash_key_range:
            return None
        return self._shards[index]
