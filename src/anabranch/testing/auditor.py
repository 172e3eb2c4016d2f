"""`Auditor`: checks whether a run kept its promises, from what was written, started, finished and committed.

It knows nothing about the consumer, so it can audit a handler in production, or the merged logs of many processes. Call
its methods in the order in which things happened; only `wrote` may come later, even at the end.

- Order: no record of a key is started for the first time before the record before it is finished. One owner (one fence
  token) goes forward, one record of a key at a time.
- No loss: every record that was written is finished.
- Repeats are counted. A record that was committed as finished must not be repeated.
- A call whose fence token is below the highest seen for its key is a zombie: it outlived its lease. Zombies are counted
  separately. They do not break the order and finish nothing.
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
    """The result of an audit. The counts are complete; `findings` names the first few of each kind."""

    written_count: int
    started_count: int
    """Without the starts of zombies."""
    finished_count: int
    """Distinct records."""
    repeated_count: int
    """Starts of records that were finished before, for example since the last commit before a crash."""
    zombie_count: int
    """Starts and ends of calls that outlived their lease."""
    order_break_count: int
    lost_count: int
    """Records that were written and never finished."""
    unexpected_count: int
    """Records that were handled but never written; 0 if `wrote` was never called."""
    committed_repeat_count: int
    """Repeats of records that were committed as finished."""
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


class _KeyAudit:
    """One partition key of one stream."""

    __slots__ = ("finished", "last", "latest", "token", "written")

    def __init__(self) -> None:
        self.token = 0
        """The highest fence token seen, which is the current owner's."""
        self.last: Position | None = None
        """What the current owner started last."""
        self.latest: Position | None = None
        """The highest position that was ever started."""
        self.finished: dict[Position, bool] = {}
        """Every record that was started, and whether it is finished."""
        self.written: dict[Position, None] = {}

    def order_break(self, position: Position) -> str | None:
        """Why this record must not start now; None if it may."""
        last, latest = self.last, self.latest
        if last is not None and position < last:
            return f"started after {last} by the same owner"
        if last is not None and position != last and not self.finished[last]:
            return f"started while {last} was running, by the same owner"
        if latest is None or position in self.finished:
            return None
        if position < latest:
            return f"first started after {latest}"
        return None if self.finished[latest] else f"first started before {latest} was finished"


class Auditor:
    def __init__(self) -> None:
        self._keys: dict[tuple[str, str], _KeyAudit] = {}
        self._checkpoints: dict[str, Checkpoint | None] = {}
        """By shard; None for a shard that was committed as finished."""
        self._started_count = 0
        self._repeated_count = 0
        self._zombie_count = 0
        self._order_break_count = 0
        self._committed_repeat_count = 0
        self._findings: list[str] = []
        self.outstanding_count = 0
        """Records that are written and not finished yet."""

    def wrote(self, record: PutResult | Record[Any]) -> None:
        """The record is in the stream. A `PutResult` must be a delivered one."""
        assert record.sequence_number is not None, "wrote() needs a delivered record"
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
        """The handler call with this record returned."""
        key, position = self._key(record), record.position
        if fence_token < key.token:
            self._zombie_count += 1
        elif not key.finished.get(position):
            key.finished[position] = True
            self.outstanding_count -= position in key.written

    def commit(self, row: LeaseRow) -> None:
        """The lease store has this row: what it says is finished must not be started any more."""
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

    def _key(self, record: PutResult | Record[Any]) -> _KeyAudit:
        name = (record.stream, record.partition_key)
        key = self._keys.get(name)
        if key is None:
            key = self._keys[name] = _KeyAudit()
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
