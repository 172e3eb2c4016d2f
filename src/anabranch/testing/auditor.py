"""`Auditor`: did a run keep its promises? Told what was written, started, finished and committed, it says what broke.

It knows nothing of the consumer: it can audit a handler in production, or the merged logs of many processes. What it is
told must come in the order in which it happened; what was written may be told late, even at the very end.

- Order: no record of a key is first started before the one before it was finished, and one holding (one fence token)
  goes forward, one record of a key at a time.
- Nothing lost: every record that was written is finished by somebody.
- Repeats are counted; a record that the lease store already held as finished must not be among them.
- An effect whose fence token is below the highest seen for its key is a zombie's: a call that outlived its lease. It is
  counted apart and is never part of the order, nor does it finish anything.
"""

from typing import Any

import msgspec

from anabranch._model.leases import Checkpoint, LeaseRow
from anabranch._model.streams import Position
from anabranch.records import PutResult, Record
from anabranch.testing.checkers import covers

__all__ = ["AuditReport", "Auditor"]

EXAMPLES_MAX = 20


class AuditReport(msgspec.Struct, frozen=True, kw_only=True):
    """What an audit found. The counts are complete; of each kind of finding the first few are named."""

    written_count: int
    started_count: int
    """Starts of zombies are not among these."""
    finished_count: int
    """Different records that were finished."""
    repeated_count: int
    """Starts of records that were finished before: after a crash, what was finished since the last commit."""
    zombie_count: int
    """Starts and ends of calls that outlived their lease."""
    order_break_count: int
    lost_count: int
    """Records that were written and never finished."""
    unexpected_count: int
    """Records that were handled and never written; 0 where nothing was told of writing."""
    committed_repeat_count: int
    """Repeats of what a commit had declared finished."""
    findings: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        return not (self.order_break_count or self.lost_count or self.unexpected_count or self.committed_repeat_count)

    def __str__(self) -> str:
        counts = (
            f"{self.written_count} written, {self.finished_count} finished, {self.repeated_count} repeated, "
            f"{self.zombie_count} zombie effects; order broken {self.order_break_count} times, {self.lost_count} lost, "
            f"{self.unexpected_count} unexpected, {self.committed_repeat_count} repeated although committed"
        )
        return "\n  ".join([counts, *self.findings])


class _Key:
    """One partition key of one stream."""

    __slots__ = ("finished", "last", "latest", "token", "written")

    def __init__(self) -> None:
        self.token = 0
        """The highest fence token seen: the holding that may work now."""
        self.last: Position | None = None
        """What that holding started last."""
        self.latest: Position | None = None
        """The highest position that anybody has started."""
        self.finished: dict[Position, bool] = {}
        """Every record started so far, and whether it was finished."""
        self.written: dict[Position, None] = {}

    def order_break(self, position: Position) -> str | None:
        """What is wrong with starting this record now."""
        last, latest = self.last, self.latest
        if last is not None and position < last:
            return f"started after {last} by the same holding"
        if last is not None and position != last and not self.finished[last]:
            return f"started beside {last} by the same holding"
        if latest is None or position in self.finished:
            return None
        if position < latest:
            return f"first started after {latest}"
        return None if self.finished[latest] else f"first started before {latest} was finished"


class Auditor:
    def __init__(self) -> None:
        self._keys: dict[tuple[str, str], _Key] = {}
        self._checkpoints: dict[str, Checkpoint | None] = {}
        """By shard; None for a shard whose end was committed."""
        self._started_count = 0
        self._repeated_count = 0
        self._zombie_count = 0
        self._order_break_count = 0
        self._committed_repeat_count = 0
        self._findings: list[str] = []
        self.outstanding_count = 0
        """Records that were written and are not finished yet."""

    def wrote(self, record: PutResult | Record[Any]) -> None:
        """The stream took this record; a `PutResult` must be one that was delivered."""
        assert record.sequence_number is not None, "only a delivered record can be expected to be handled"
        key, position = self._key(record), Position(int(record.sequence_number), record.sub_sequence_number)
        if position not in key.written:
            key.written[position] = None
            self.outstanding_count += not key.finished.get(position, False)

    def start(self, record: Record[Any], fence_token: int) -> None:
        """A handler was called with this record."""
        key, position = self._key(record), record.position
        if fence_token < key.token:
            self._zombie_count += 1
            return
        if fence_token > key.token:
            key.token, key.last = fence_token, None
        self._started_count += 1
        if (problem := key.order_break(position)) is not None:
            self._order_break_count += 1
            self._find(self._order_break_count, f"order: {_place(record)}, token {fence_token}, {problem}")
        if key.finished.setdefault(position, False):
            self._repeat(record, position)
        key.last = position
        key.latest = position if key.latest is None else max(key.latest, position)

    def finish(self, record: Record[Any], fence_token: int) -> None:
        """That call came to its end: its effect is there."""
        key, position = self._key(record), record.position
        if fence_token < key.token:
            self._zombie_count += 1
        elif not key.finished.get(position):
            key.finished[position] = True
            self.outstanding_count -= position in key.written

    def commit(self, row: LeaseRow) -> None:
        """The lease store holds this row: what it declares finished must not be started from now on."""
        self._checkpoints[row.key.shard_id] = None if row.is_finished else row.checkpoint

    def report(self) -> AuditReport:
        lost: list[str] = []
        unexpected: list[str] = []
        knows_writes = any(key.written for key in self._keys.values())
        for (_, name), key in self._keys.items():
            lost.extend(f"lost: {name!r} at {at}" for at in key.written if not key.finished.get(at))
            if knows_writes:
                unexpected.extend(f"never written: {name!r} at {at}" for at in key.finished if at not in key.written)
        return AuditReport(
            written_count=sum(len(key.written) for key in self._keys.values()),
            started_count=self._started_count,
            finished_count=sum(sum(key.finished.values()) for key in self._keys.values()),
            repeated_count=self._repeated_count,
            zombie_count=self._zombie_count,
            order_break_count=self._order_break_count,
            lost_count=len(lost),
            unexpected_count=len(unexpected),
            committed_repeat_count=self._committed_repeat_count,
            findings=(*self._findings, *lost[:EXAMPLES_MAX], *unexpected[:EXAMPLES_MAX]),
        )

    def _key(self, record: PutResult | Record[Any]) -> _Key:
        name = (record.stream, record.partition_key)
        key = self._keys.get(name)
        if key is None:
            key = self._keys[name] = _Key()
        return key

    def _repeat(self, record: Record[Any], position: Position) -> None:
        self._repeated_count += 1
        if record.shard_id not in self._checkpoints:
            return
        checkpoint = self._checkpoints[record.shard_id]
        if checkpoint is None or covers(checkpoint, position, record.partition_key):
            self._committed_repeat_count += 1
            self._find(self._committed_repeat_count, f"repeated although committed: {_place(record)}")

    def _find(self, count: int, what: str) -> None:
        if count <= EXAMPLES_MAX:
            self._findings.append(what)


def _place(record: Record[Any]) -> str:
    return f"{record.partition_key!r} at {record.shard_id}/{record.position}"
