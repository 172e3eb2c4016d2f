"""A stream that splits and merges in its own time, and answers as the service does; the judge of the lineage laws.

It knows nothing of the code under test. Times are whole seconds; children begin one second after their parents' close,
as the service has it, so that there is a second in which neither is open.
"""

from anabranch._model.hash_keys import HashKeyRange, even_ranges
from anabranch._model.streams import Shard
from anabranch._wire.messages import ChildShard


class History:
    def __init__(self, shard_count):
        self.now = 10
        self.horizon = 0
        self.born = {}
        self.closed = {}
        self.ranges = {}
        self.parents = {}
        for hash_key_range in even_ranges(shard_count):
            self._bear(hash_key_range, ())
        self.now += 1

    def _bear(self, hash_key_range, parents):
        shard_id = f"shardId-{len(self.born):012d}"
        self.born[shard_id] = self.now
        self.ranges[shard_id] = hash_key_range
        self.parents[shard_id] = parents

    def open_shards(self):
        found = [shard_id for shard_id in self.born if shard_id not in self.closed]
        return sorted(found, key=self.ranges.__getitem__)

    def split(self, shard_id):
        start, end = self.ranges[shard_id]
        self.closed[shard_id] = self.now
        self.now += 1
        middle = start + (end - start) // 2
        self._bear(HashKeyRange(start, middle), (shard_id,))
        self._bear(HashKeyRange(middle + 1, end), (shard_id,))
        self.now += 1

    def merge(self, left, right):
        self.closed[left] = self.closed[right] = self.now
        self.now += 1
        self._bear(HashKeyRange(self.ranges[left].start, self.ranges[right].end), (left, right))
        self.now += 1

    def reshard(self, random):
        open_shards = self.open_shards()
        index = random.randrange(len(open_shards))
        if index + 1 < len(open_shards) and random.random() < 0.5:
            self.merge(open_shards[index], open_shards[index + 1])
        else:
            self.split(open_shards[index])

    # what the service answers
    def is_gone(self, shard_id):
        return self.closed.get(shard_id, self.horizon) < self.horizon

    def shard(self, shard_id):
        parents = self.parents[shard_id]
        closed = self.closed.get(shard_id)
        return Shard(
            shard_id=shard_id,
            hash_key_range=self.ranges[shard_id],
            starting_sequence_number=self.born[shard_id],
            ending_sequence_number=closed,
            parent_shard_id=parents[0] if parents else None,
            adjacent_parent_shard_id=parents[1] if len(parents) > 1 else None,
        )

    def in_scope(self, since):
        return [shard_id for shard_id in self.born if self.closed.get(shard_id, since) >= since]

    def listing(self, since=0):
        """ListShards FROM_TIMESTAMP."""
        return tuple(self.shard(shard_id) for shard_id in self.in_scope(since) if not self.is_gone(shard_id))

    def child_shards(self, shard_id):
        return tuple(
            ChildShard(child, parents, self.ranges[child])
            for child, parents in self.parents.items()
            if shard_id in parents
        )
