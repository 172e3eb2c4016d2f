"""P1: no record is started for the first time before every earlier one of its key was finished, and one holding's calls
of a key come in stream order, one at a time. The records of one batch count as one call.
"""

from bisect import bisect_left, insort

from anabranch._model.streams import Position
from anabranch.testing.checkers.journal import Call, Checker, Written

__all__ = ["OrderPerKey"]


Holding = tuple[str, str, int]
"""Process, shard, fence token: after a store went back in time, another shard of the line may have the same token."""


class _Key:
    def __init__(self) -> None:
        self.written: list[Position] = []
        self.finished: dict[Position, None] = {}
        self.done_count = 0
        """The first so many of the written ones are finished."""
        self.running: dict[Holding, dict[Position, int]] = {}
        """With the number of the batch that each is in."""
        self.last_started: dict[Holding, Position] = {}

    def finish(self, position: Position) -> None:
        self.finished[position] = None
        while self.done_count < len(self.written) and self.written[self.done_count] in self.finished:
            self.done_count += 1

    def first_unfinished_before(self, position: Position, together: dict[Position, int]) -> Position | None:
        """Leaving out what runs together with it."""
        for index in range(self.done_count, bisect_left(self.written, position)):
            before = self.written[index]
            if before not in self.finished and before not in together:
                return before
        return None


class OrderPerKey(Checker):
    promise = "order"

    def __init__(self) -> None:
        super().__init__()
        self._keys: dict[str, _Key] = {}

    def _key(self, partition_key: str) -> _Key:
        return self._keys.setdefault(partition_key, _Key())

    def written(self, record: Written) -> None:
        insort(self._key(record.partition_key).written, record.position)

    def excused(self, record: Written) -> None:
        self._key(record.partition_key).finish(record.position)

    def started(self, call: Call) -> None:
        key, holding = self._key(call.partition_key), (call.process, call.shard_id, call.fence_token)
        running = key.running.setdefault(holding, {})
        together = {position: batch for position, batch in running.items() if batch and batch == call.batch}
        if (earlier := key.first_unfinished_before(call.position, together)) is not None:
            self.complain(call.at_ms, f"{call} starts, but {earlier} of its key was not finished")
        if len(together) < len(running):
            other = next(position for position in running if position not in together)
            self.complain(call.at_ms, f"{call} starts beside {other} of its key")
        if (before := key.last_started.get(holding)) is not None and call.position < before:
            self.complain(call.at_ms, f"{call} starts after {before} in the same holding")
        running[call.position] = call.batch
        key.last_started[holding] = call.position

    def finished(self, call: Call) -> None:
        self._end(call)
        self._key(call.partition_key).finish(call.position)

    def abandoned(self, call: Call) -> None:
        self._end(call)
        # It comes again, and so does what followed it in its batch.
        last, holding = self._key(call.partition_key).last_started, (call.process, call.shard_id, call.fence_token)
        if holding in last:
            last[holding] = min(last[holding], call.position)

    def _end(self, call: Call) -> None:
        holding = (call.process, call.shard_id, call.fence_token)
        self._key(call.partition_key).running.get(holding, {}).pop(call.position, None)
