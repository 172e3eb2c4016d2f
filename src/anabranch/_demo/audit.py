"""Counts the outcome of each record, by the same rules for our workers and for each alternative (the *sides*).

Record numbers grow with each put of a key. A record is *lost* if nobody handled it, *out of order* if its first
handling came after that of a later record of its key, and each further handling is a *repeat*. Handlings of several
processes are ordered by the machine's clock, which they share.
"""

from collections.abc import Iterable, Mapping
from typing import Final, NamedTuple

import msgspec


class PutRecord(NamedTuple):
    partition_key: str
    shard_id: str


class HandledRecord(msgspec.Struct, frozen=True, order=True, gc=False):
    """One record was handled: when (nanoseconds of the machine's monotonic clock), what, by whom."""

    at_ns: int
    number: int
    worker: str


class AuditVerdict(msgspec.Struct, frozen=True):
    put: int
    handled: int
    lost: int
    out_of_order: int
    repeated: int

    @property
    def is_clean(self) -> bool:
        return self.lost == 0 and self.out_of_order == 0


class Recovery(msgspec.Struct, frozen=True):
    """Seconds until the affected shards were read again, by side; None if it took longer than `watched_seconds`."""

    after: str
    watched_seconds: float
    seconds: dict[str, float | None]


class Audit(msgspec.Struct, frozen=True):
    """All sides of one run, as `--json` prints them."""

    seed: int
    ours: AuditVerdict
    peers: dict[str, AuditVerdict]
    recoveries: tuple[Recovery, ...]

    @property
    def is_clean(self) -> bool:
        """Our side lost nothing and kept the order, in a run that wrote something."""
        return self.ours.is_clean and self.ours.put > 0


HEADINGS: Final = {"plain": "plain loop", "careful": "careful loop"}
FIGURES: Final = (
    ("records put", "put"),
    ("handled", "handled"),
    ("not handled", "lost"),
    ("out of order", "out_of_order"),
    ("handled again", "repeated"),
)
"""The rows of the audit, with the fields that they show."""
MUST_BE_ZERO: Final = ("not handled", "out of order")


def audit_lines(audit: Audit) -> list[list[str]]:
    """The audit as a table of texts: the headings, the outcomes of the records, and the recovery after each event."""
    sides = [*audit.peers.values(), audit.ours]
    lines = [["", *(HEADINGS.get(name, name) for name in (*audit.peers, "anabranch"))]]
    lines += [[name, *(str(getattr(side, field)) for side in sides)] for name, field in FIGURES]
    for recovery in audit.recoveries:
        lines.append([f"read after {recovery.after}", *(_seconds(recovery, name) for name in recovery.seconds)])
    return lines


def _seconds(recovery: Recovery, name: str) -> str:
    seconds = recovery.seconds[name]
    return f"> {recovery.watched_seconds:.0f} s" if seconds is None else f"{seconds:.1f} s"


def judge(put: Mapping[int, PutRecord], handlings: Iterable[HandledRecord]) -> AuditVerdict:
    """`put` has the accepted records by number."""
    seen: dict[int, None] = {}
    latest: dict[str, int] = {}
    out_of_order = repeated = 0
    for handling in sorted(handlings):
        if handling.number not in put:
            continue
        if handling.number in seen:
            repeated += 1
            continue
        seen[handling.number] = None
        key = put[handling.number].partition_key
        if latest.get(key, -1) > handling.number:
            out_of_order += 1
        latest[key] = max(handling.number, latest.get(key, -1))
    return AuditVerdict(
        put=len(put),
        handled=len(seen),
        lost=len(put) - len(seen),
        out_of_order=out_of_order,
        repeated=repeated,
    )


def recovery_seconds(
    event_ns: int,
    shard_ids: Iterable[str],
    put: Mapping[int, PutRecord],
    handlings: Iterable[HandledRecord],
    *,
    not_by: str | None = None,
) -> float | None:
    """Seconds until each of the shards had a record handled again, not counting the worker `not_by`.

    None if one of them never had. Shards without written records do not count.
    """
    written = {record.shard_id for record in put.values()}
    waiting = dict.fromkeys(shard_id for shard_id in shard_ids if shard_id in written)
    last_ns = event_ns
    for handling in sorted(handlings):
        record = put.get(handling.number)
        if record is None or handling.at_ns < event_ns or handling.worker == not_by:
            continue
        if record.shard_id in waiting:
            del waiting[record.shard_id]
            last_ns = handling.at_ns
    return None if waiting else (last_ns - event_ns) / 1e9
