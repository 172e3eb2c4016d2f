"""P1: no record is started for the first time before every earlier one of its key was finished, and one holding's calls
of a key come in stream order, one at a time.
"""

from bisect import bisect_left, insort

from anabranch._model.sequence_numbers import Position
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
        self.running: dict[Holding, Position] = {}
        self.last_started: dict[Holding, Position] = {}

    def finish(self, position: Position) -> None:
        self.finished[position] = None
        while self.done_count < len(self.written) and self.written[self.done_count] in self.finished:
            self.done_count += 1


class OrderPerKey(Checker):
    promise = "order"

    def __init__(self) -> None:
        super().__init__()
        self._keys: dict[str, _Key] = {}

    def _key(self, partition_key: str) -> _Key:
        return self._keys.setdefault(partition_key, _Key())

    def written(self, record: Written) -> None:
        insort(self._key(record.partition_key).written, record.position)

    def started(self, call: Call) -> None:
        key, holding = self._key(call.partition_key), (call.process, call.shard_id, call.fence_token)
        index = bisect_left(key.written, call.position)
        if index > key.done_count:
            self.complain(call.at_ms, f"{call} starts, but {key.written[key.done_count]} of its key was not finished")
        if (running := key.running.get(holding)) is not None:
            self.complain(call.at_ms, f"{call} starts beside {running} of its key")
        if (before := key.last_started.get(holding)) is not None and call.position < before:
            self.complain(call.at_ms, f"{call} starts after {before} in the same holding")
        key.running[holding] = key.last_started[holding] = call.position

    def finished(self, call: Call) -> None:
        self.abandoned(call)
        self._key(call.partition_key).finish(call.position)

    def abandoned(self, call: Call) -> None:
        running, holding = self._key(call.partition_key).running, (call.process, call.shard_id, call.fence_token)
        if running.get(holding) == call.position:
            del running[holding]
