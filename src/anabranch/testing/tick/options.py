"""What one world is like: sizes, faults and their rates, drawn from its seed before it runs.

Each world gets its own mix, and leaves most faults out: worlds that have everything at once hide the bugs that need a
long calm stretch before one fault.
"""

from random import Random

import msgspec

__all__ = ["WorldOptions", "options_for"]


class WorldOptions(msgspec.Struct, frozen=True, kw_only=True):
    worker_count: int = 3
    lease_count: int = 1
    faulty_ms: int = 240_000
    """How long faults go on; then the world has to settle."""
    settling_ms: int = 100_000
    """How long it then runs on without any; whether it has settled is judged if that is long enough for it."""
    expiry_ms: tuple[int, ...] = (10_000,)
    """Given to the workers in turn: a fleet in the middle of a deploy has two."""
    lost: float = 0.0
    """The share of requests that get lost, and of answers."""
    late: float = 0.0
    """The share of messages that arrive 1.5 to 14 s late; requests take effect even though the caller has given up."""
    repeated: float = 0.0
    """The share of requests that take effect twice."""
    lag_ms_max: int = 0
    """Reads may show the store as it was this long ago."""
    clock_error: float = 0.0
    """How much faster or slower a worker's clock may run; 0.01 is 1 %."""
    clocks_stop: bool = False
    """Whether clocks stand still while their machine is paused."""
    pauses_each_ms: int = 0
    """Mean time between two pauses of a worker; 0: none."""
    stalls_each_ms: int = 0
    """As pauses, of all but the heartbeats."""
    gaps: float = 0.0
    """The share of starts that are paused between the look at the clock and the call."""
    partitions_each_ms: int = 0
    crashes_each_ms: int = 0
    stops_each_ms: int = 0
    """Mean time between two clean stops of a worker, each followed by a start."""
    outage_ms: int = 0
    """Once, the store is away for so long."""
    roll_backs_each_ms: int = 0
    """Mean time between two times that the store goes back in time, and says that it is another one."""
    roll_back_ms: int = 10_000
    """How far it goes back."""
    reset: bool = False
    """Once, the store loses everything; fresh workers find a new application."""
    rows_deleted_each_ms: int = 0
    """Mean time between two deletions of a live member's row by somebody's hand."""
    commit_each_ms: int = 2_000
    overruns: float = 0.0
    """The share of handler calls that take 4 to 20 s."""
    same_worker_id: bool = False
    """All workers are configured with one worker id."""


def options_for(seed: int) -> WorldOptions:
    """The mix of one seed. Every fault is in a good part of the worlds, none in all of them."""
    random = Random(f"options {seed}")  # noqa: S311 -- a simulation's dice, not a secret
    large = seed % 25 == 24

    def sometimes(chance: float, low: int, high: int) -> int:
        return random.randrange(low, high) if random.random() < chance else 0

    return WorldOptions(
        worker_count=random.randrange(5, 9) if large else random.randrange(2, 5),
        lease_count=random.randrange(8, 17) if large else random.randrange(1, 5),
        faulty_ms=random.randrange(40_000, 80_000),
        settling_ms=100_000 if seed % 4 == 0 else 15_000,
        expiry_ms=random.choice([(10_000,), (10_000,), (10_000, 5_000), (5_000, 10_000, 3_000)]),
        lost=random.choice([0.0, 0.01, 0.04, 0.1]),
        late=random.choice([0.0, 0.01, 0.03, 0.1]),
        repeated=random.choice([0.0, 0.0, 0.02]),
        lag_ms_max=sometimes(0.15, 500, 16_000),
        clock_error=random.choice([0.0, 0.005, 0.01]),
        clocks_stop=random.random() < 0.2,
        pauses_each_ms=sometimes(0.5, 15_000, 60_000),
        stalls_each_ms=sometimes(0.3, 15_000, 60_000),
        gaps=random.choice([0.0, 0.0, 0.01]),
        partitions_each_ms=sometimes(0.5, 15_000, 60_000),
        crashes_each_ms=sometimes(0.4, 20_000, 80_000),
        stops_each_ms=sometimes(0.4, 15_000, 60_000),
        outage_ms=sometimes(0.1, 3_000, 30_000),
        roll_backs_each_ms=sometimes(0.1, 15_000, 60_000),
        roll_back_ms=random.randrange(500, 20_000),
        reset=random.random() < 0.03,
        rows_deleted_each_ms=sometimes(0.05, 20_000, 60_000),
        commit_each_ms=random.choice([1_000, 2_000, 10_000]),
        overruns=random.choice([0.0, 0.0, 0.03]),
        same_worker_id=random.random() < 0.2,
    )
