"""How many workers a fleet should have, from its lag, its rate and its shards.

A fleet that is behind works as fast as it can: if each worker handles as much as now, `1 + lag / catch_up` times as
many workers handle what arrives and what has piled up. Workers beyond the number of shards would be idle. Shards that
more workers cannot help (stopped, paused or throttled) do not count.
"""

from collections.abc import Sequence
from math import ceil
from typing import Final

from anabranch.reports import DesiredWorkers, FleetMember, FleetShard, FleetStatus

HELPED_BY_WORKERS: Final = frozenset(
    {
        "budget-full",
        "held-back-bytes-limit",
        "no-room-for-held-back",
        "open-keys-limit",
        "record-in-handler",
        "record-unfinished",
        "replay-bytes-limit",
    }
)
"""Codes of reasons of a stalled shard: its worker has too much to do."""


def desired_workers(
    status: FleetStatus,
    *,
    target_lag: float,
    catch_up: float,
    worker_rate: float | None,
    minimum: int,
    maximum: int | None,
) -> DesiredWorkers:
    """`worker_rate` is how many records a busy worker handles in a second; None if unknown. Then fewer workers than now
    are advised only if there are more workers than shards, or if no records arrive. The rate never lowers the number of
    workers while the fleet is behind, or while its lag or rate is unknown.
    """
    live = [member for member in status.live_members if not member.draining]
    shards = [shard for shard in status.unfinished_shards if shard.state not in {"waiting", "paused", "stopped"}]
    lag = max((shard.lag for shard in shards if shard.lag is not None and _is_helped(shard)), default=None)
    rate = status.records_per_second
    behind = lag is not None and lag > target_lag
    factor = 1.0 + (lag or 0.0) / catch_up if behind else 1.0
    if worker_rate is not None:
        wanted, why = ceil(rate * factor / worker_rate), f"{rate:.0f} records/s at {worker_rate:g} for each worker"
    elif behind:
        wanted, why = ceil(len(live) * factor), f"to catch up in {catch_up:.0f} s"
    elif lag == 0 and rate == 0:
        wanted, why = 0, "nothing arrives"
    else:
        wanted, why = len(live), "the lag is within its target" if lag is not None else "the lag is not known"
    if wanted < len(live) and (doubt := _doubt(live, lag, behind=behind)) is not None:
        wanted, why = len(live), doubt
    if behind:
        why = f"{lag:.0f} s behind: {why}"
    most = min((member.shards_max for member in live if member.shards_max), default=None)
    if most is not None and (needed := ceil(len(shards) / most)) > wanted:
        wanted, why = needed, f"a worker takes {most} shards at most"
    if wanted > len(shards):
        wanted, why = len(shards), f"{why}; there are {len(shards)} shards"
    workers = max(wanted, minimum, 1 if shards else 0)
    return DesiredWorkers(
        workers=workers if maximum is None else min(workers, maximum),
        live_workers=len(live),
        shard_count=len(shards),
        lag=lag,
        records_per_second=rate,
        why=why,
    )


def _doubt(live: Sequence[FleetMember], lag: float | None, *, behind: bool) -> str | None:
    """Why the rate does not show that fewer workers are enough; None if it does."""
    if behind:
        return "each worker handles less than worker_rate"
    if lag is None:
        return "the lag is not known"
    return "the rate is not known" if any(member.records_per_second is None for member in live) else None


def _is_helped(shard: FleetShard) -> bool:
    if shard.state == "stalled":
        return shard.reason is not None and shard.reason.code in HELPED_BY_WORKERS
    return True
