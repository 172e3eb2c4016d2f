"""`simulate(handler, records)`: a user's handler in a fleet of real workers, with faults, in virtual time.

Everything is decided by the seed: the same call gives the same run. The handler must be an async function that waits
by `asyncio` alone; there are no threads, no sockets and no real time in a simulation, and an hour of waiting costs
nothing.
"""

from collections.abc import Awaitable, Callable, Iterable
from typing import Any, Final, Literal, get_args

import msgspec

from anabranch.policies import Retry
from anabranch.records import Record
from anabranch.testing.world import FleetOptions, run_fleet
from anabranch.testing.world.options import Scene
from anabranch.testing.world.worker import SimulatedHandling

__all__ = ["Fault", "SimulationReport", "simulate"]

Fault = Literal["crash", "cut_off", "lost_messages", "pause", "reshard", "stop", "throttle"]

_FAULTS: Final[dict[str, dict[str, Any]]] = {
    "crash": {"crashes_each": 12.0},
    "cut_off": {"cuts_each": 12.0},
    "lost_messages": {"lost": 0.05, "late": 0.05},
    "pause": {"pauses_each": 12.0},
    "reshard": {"reshards_each": 6.0},
    "stop": {"stops_each": 12.0},
    "throttle": {"throttled": 0.2},
}


class SimulationReport(msgspec.Struct, frozen=True, kw_only=True):
    seed: int
    record_count: int
    call_count: int
    """Handler calls that were started: more than records where some were repeated, after a crash for example."""
    finished_count: int
    seconds: float
    """Virtual ones."""
    violations: tuple[str, ...]
    """Broken promises, the first one first: of anabranch, or of a handler that never ends."""

    @property
    def repeated_count(self) -> int:
        return max(0, self.call_count - self.record_count)

    def check(self) -> None:
        """Raises AssertionError with the first violation and the seed, if there is any."""
        if self.violations:
            raise AssertionError(f"{self.violations[0]} (simulate(..., seed={self.seed}) repeats this run)")


def simulate(
    handler: Callable[[Record[bytes]], Awaitable[Any]],
    records: Iterable[tuple[str, bytes]],
    *,
    seed: int = 0,
    workers: int = 2,
    shards: int = 2,
    order: Literal["shard", "key", "none"] = "shard",
    concurrency: int = 8,
    faults: Iterable[Fault] = (),
    script: Iterable[tuple[float, Scene]] = (),
    seconds: float = 30.0,
    on_failure: Retry | None = None,
) -> SimulationReport:
    """Writes `records`, (partition key, data) each, over so many virtual seconds while the faults strike; then
    everything must be handled within three virtual minutes.

    `faults` strike again and again, when the seed says; `script` says what happens at which second, for example
    `[(5.0, "split"), (9.0, "crash")]`.
    """
    written = list(records)
    chosen: dict[str, Any] = {}
    for fault in faults:
        if fault not in _FAULTS:
            raise ValueError(f"there is no fault {fault!r}; there are {', '.join(sorted(_FAULTS))}")
        chosen |= _FAULTS[fault]
    scenes = tuple(script)
    for _, scene in scenes:
        if scene not in get_args(Scene):
            raise ValueError(f"there is no scene {scene!r}; there are {', '.join(get_args(Scene))}")
    options = FleetOptions(
        worker_count=workers,
        shard_count=shards,
        record_count=len(written),
        order=order,
        concurrency=concurrency,
        faulty_seconds=seconds,
        script=scenes,
        **chosen,
    )
    verdict = run_fleet(seed, options, handling=SimulatedHandling(handler, on_failure or Retry()), records=written)
    return SimulationReport(
        seed=seed,
        record_count=len(written),
        call_count=verdict.starts,
        finished_count=verdict.finishes,
        seconds=verdict.seconds,
        violations=tuple(str(violation) for violation in verdict.violations),
    )
