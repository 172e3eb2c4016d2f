"""Counts the outcome of each record, by the same rules for both sides.

Record numbers grow with each put of a key. A record is *lost* if nobody handled it, *out of order* if its first
handling came after that of a later record of its key, and each further handling is a *repeat*. Handlings of several
processes are ordered by the machine's clock, which they share.
"""

from collections.abc import Iterable, Mapping

import msgspec


class Handling(msgspec.Struct, frozen=True, order=True, gc=False):
    """One record was handled: when (nanoseconds of the machine's monotonic clock), what, where, by whom."""

    at_ns: int
    number: int
    partition_key: str
    shard_id: str
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
    """Time until the affected shards were read again; None if they never were."""

    after: str
    plain_seconds: float | None
    ours_seconds: float | None


class Audit(msgspec.Struct, frozen=True):
    """Both sides of one run, as `--json` prints them."""

    seed: int
    plain: AuditVerdict
    ours: AuditVerdict
    recoveries: tuple[Recovery, ...]

    @property
    def is_clean(self) -> bool:
        """Our side lost nothing and kept the order, in a run that wrote something."""
        return self.ours.is_clean and self.ours.put > 0


def judge(put: Mapping[int, str], handlings: Iterable[Handling]) -> AuditVerdict:
    """`put` maps the number of each accepted record to its partition key."""
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
        if latest.get(handling.partition_key, -1) > handling.number:
            out_of_order += 1
        latest[handling.partition_key] = max(handling.number, latest.get(handling.partition_key, -1))
    return AuditVerdict(
        put=len(put),
        handled=len(seen),
        lost=len(put) - len(seen),
        out_of_order=out_of_order,
        repeated=repeated,
    )


def recovery_seconds(
    event_ns: int, shard_ids: Iterable[str], handlings: Iterable[Handling], *, not_by: str | None = None
) -> float | None:
    """Seconds until each of the shards had a record handled again, not counting the worker `not_by`.

    None if a shard never had.
    """
    waiting = dict.fromkeys(shard_ids)
    last_ns = event_ns
    for handling in sorted(handlings):
        if handling.at_ns >= event_ns and handling.shard_id in waiting and handling.worker != not_by:
            del waiting[handling.shard_id]
            last_ns = handling.at_ns
    return None if waiting else (last_ns - event_ns) / 1e9
