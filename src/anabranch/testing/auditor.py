"""`Auditor`: checks whether a run kept its promises, from what was written, started, finished and committed.

It knows nothing about the consumer, so it can audit a handler in production, or the merged logs of many processes. Call
its methods in the order of the events; only `wrote` may be called later, even at the end.

- Order: a record of a key starts for the first time only after the previous one is finished. An owner (a fence token)
  never goes back to an earlier record of a key, and runs one record of a key at a time.
- No loss: every record that was written is finished.
- Repeats: they are counted. A record that was committed as finished must not be repeated.
- Zombies: a call whose fence token is below the highest seen for its key outlived its lease. Zombies are counted
  separately. They cannot break the order, and they finish no record.
"""

from collections import defaultdict
from typing import Any

import msgspec

from anabranch._model.leases import Checkpoint, LeaseRow
from anabranch._model.streams import Position
from anabranch.records import PutResult, Record
from anabranch.testing.checkers import covers

FINDINGS_PER_KIND_MAX = 20


class AuditReport(msgspec.Struct, frozen=True, kw_only=True):
    """The result of an audit. The counts are complete; `findings` names the first few of each kind."""

    written_count: int
    started_count: int
    """Starts of records, without those by zombies."""
    finished_count: int
    """Distinct records that were finished."""
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
            f"{self.zombie_count} starts and ends of zombies; order broken {self.order_break_count} times, "
            f"{self.lost_count} lost, {self.unexpected_count} unexpected, "
            f"{self.committed_repeat_count} repeated after their commit"
        )
        return "\n  ".join([counts, *self.findings])


class _KeyAudit:
    """One partition key of one stream."""

    def __init__(self) -> None:
        self.fence_token = 0
        """The highest fence token seen, which is the current owner's."""
        self.last_started: Position | None = None
        """By the current owner."""
        self.highest_started: Position | None = None
        """By any owner."""
        self.is_finished: dict[Position, bool] = {}
        """For every record that was started."""
        self.written: dict[Position, None] = {}

    def order_break(self, position: Position) -> str | None:
        """Why this record must not start now; None if it may."""
        last, highest = self.last_started, self.highest_started
        if last is not None and position < last:
            return f"started after {last} by the same owner"
        if last is not None and position != last and not self.is_finished[last]:
            return f"started while {last} was running, by the same owner"
        if highest is None or position in self.is_finished:
            return None
        if position < highest:
            return f"first started after {highest}"
        return None if self.is_finished[highest] else f"first started before {highest} was finished"


class Auditor:
    def __init__(self) -> None:
        self._keys: defaultdict[tuple[str, str], _KeyAudit] = defaultdict(_KeyAudit)
        self._checkpoints: dict[tuple[str, str], Checkpoint | None] = {}
        """By stream and shard; None for a shard that was committed as finished."""
        self._started_count = 0
        self._repeated_count = 0
        self._zombie_count = 0
        self._order_break_count = 0
        self._committed_repeat_count = 0
        self._findings: list[str] = []
        self.outstanding_count = 0
        """Records that are written and not finished yet."""

    def wrote(self, record: PutResult | Record[Any]) -> None:
        """The record is in the stream; the `PutResult` of a record that failed is not accepted."""
        assert record.sequence_number is not None, "wrote() needs a delivered record"
        key, position = self._key(record), Position(int(record.sequence_number), record.sub_sequence_number)
        if position not in key.written:
            key.written[position] = None
            self.outstanding_count += not key.is_finished.get(position, False)

    def start(self, record: Record[Any], fence_token: int) -> None:
        """A handler was called with this record."""
        key, position = self._key(record), record.position
        if fence_token < key.fence_token:
            self._zombie_count += 1
            return
        if fence_token > key.fence_token:
            key.fence_token, key.last_started = fence_token, None
        self._started_count += 1
        if (problem := key.order_break(position)) is not None:
            self._order_break_count += 1
            self._add_finding(self._order_break_count, f"order: {_describe(record)}, token {fence_token}, {problem}")
        if key.is_finished.setdefault(position, False):
            self._count_repeat(record, position)
        key.last_started = position
        key.highest_started = position if key.highest_started is None else max(key.highest_started, position)

    def finish(self, record: Record[Any], fence_token: int) -> None:
        """The handler call with this record returned."""
        key, position = self._key(record), record.position
        if fence_token < key.fence_token:
            self._zombie_count += 1
        elif not key.is_finished.get(position):
            key.is_finished[position] = True
            self.outstanding_count -= position in key.written

    def commit(self, row: LeaseRow) -> None:
        """The lease store has accepted this row. Records that it marks as finished must not start again."""
        self._checkpoints[row.key.stream_name, row.key.shard_id] = None if row.is_finished else row.checkpoint

    def report(self) -> AuditReport:
        lost: list[str] = []
        unexpected: list[str] = []
        knows_writes = any(key.written for key in self._keys.values())
        for (_, partition_key), key in self._keys.items():
            lost.extend(f"lost: {partition_key!r} at {at}" for at in key.written if not key.is_finished.get(at))
            if knows_writes:
                unexpected.extend(
                    f"never written: {partition_key!r} at {at}" for at in key.is_finished if at not in key.written
                )
        return AuditReport(
            written_count=sum(len(key.written) for key in self._keys.values()),
            started_count=self._started_count,
            finished_count=sum(sum(key.is_finished.values()) for key in self._keys.values()),
            repeated_count=self._repeated_count,
            zombie_count=self._zombie_count,
            order_break_count=self._order_break_count,
            lost_count=len(lost),
            unexpected_count=len(unexpected),
            committed_repeat_count=self._committed_repeat_count,
            findings=(*self._findings, *lost[:FINDINGS_PER_KIND_MAX], *unexpected[:FINDINGS_PER_KIND_MAX]),
        )

    def _key(self, record: PutResult | Record[Any]) -> _KeyAudit:
        return self._keys[record.stream, record.partition_key]

    def _count_repeat(self, record: Record[Any], position: Position) -> None:
        self._repeated_count += 1
        checkpoint = self._checkpoints.get((record.stream, record.shard_id), Checkpoint())
        if checkpoint is None or covers(checkpoint, position, record.partition_key):
            self._committed_repeat_count += 1
            self._add_finding(self._committed_repeat_count, f"repeated after its commit: {_describe(record)}")

    def _add_finding(self, count: int, what: str) -> None:
        if count <= FINDINGS_PER_KIND_MAX:
            self._findings.append(what)


def _describe(record: Record[Any]) -> str:
    return f"{record.partition_key!r} at {record.shard_id}/{record.position}"
