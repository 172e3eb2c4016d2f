"""The options of a simulated fleet: sizes, faults and how records are consumed. `fleet_options_for` derives them from a
seed.
"""

from random import Random
from typing import Literal, get_args

import msgspec

__all__ = ["OVERRUN_SECONDS_MAX", "ConsumeMode", "FleetOptions", "ScriptAction", "fleet_options_for"]

ConsumeMode = Literal["batches", "manual_ack", "records", "run", "run_batches"]
"""How a process consumes: `run` and `run_batches` call a handler; the others loop over records or batches."""
ScriptAction = Literal["crash", "cut_off", "merge", "pause", "rescale", "split", "stop"]

OVERRUN_SECONDS_MAX = 40.0
"""The longest that an overrunning handler call takes."""


class FleetOptions(msgspec.Struct, frozen=True, kw_only=True):
    """An `..._every_seconds` is the mean time between two such faults; 0: none. A fault of a process is counted per
    process. Fields without a unit are shares, from 0 to 1.
    """

    worker_count: int = 2
    shard_count: int = 2
    record_count: int = 100
    key_count: int = 10
    consume_mode: ConsumeMode = "run"
    order: Literal["shard", "key", "none"] = "shard"
    concurrency: int = 8
    loop_order: Literal["fifo", "shuffle"] = "fifo"
    faulty_seconds: float = 40.0
    """How long records are written and faults occur."""
    script: tuple[tuple[float, ScriptAction], ...] = ()
    """Actions and the second of each, in addition to the random faults."""
    checkpoint_seconds: float = 1.0
    """The interval between two commits."""
    settling_seconds: float = 180.0
    """After the faults end, all records must be handled within this time plus `work_seconds`."""
    handler_seconds_max: float = 0.5
    failing: float = 0.0
    """Records whose first attempt, or first two, fail."""
    ends_at_tip: bool = False
    """Processes end at the tip of the stream, like batch jobs, and are started again."""
    undecodable: float = 0.0
    """Records that cannot be decoded while the faults last. They stop their shards; a process that starts later tries
    them again.
    """
    overrunning: float = 0.0
    """Records whose first attempt takes far too long and does not end at once when cancelled."""
    timeout_seconds: float = 0.0
    """The timeout of a handler call; 0: none."""
    aggregated: float = 0.0
    """Writes that are aggregates of up to five records."""
    budget_bytes: int = 0
    """The byte budget beyond the reserve for one read; 0: the default budget."""
    lost: float = 0.0
    """Requests that are lost, and responses."""
    late: float = 0.0
    """Requests and responses that take seconds."""
    repeated: float = 0.0
    """Requests that arrive twice."""
    throttled: float = 0.0
    """Kinesis calls that are throttled."""
    unavailable: float = 0.0
    """Kinesis calls that fail with a 5xx status."""
    expired: float = 0.0
    """Reads that fail because the iterator expired."""
    clock_error: float = 0.0
    """How much faster or slower a process's clock may run; 0.01 is 1 %."""
    clocks_stop: bool = False
    """The clock of a paused process stops."""
    pause_every_seconds: float = 0.0
    stall_every_seconds: float = 0.0
    """Like a pause, but heartbeats continue."""
    paused_starts: float = 0.0
    """Handler calls whose process is paused between the check of the fence and the call."""
    cut_off_every_seconds: float = 0.0
    """A process loses its connection to the store, the stream, or both."""
    crash_every_seconds: float = 0.0
    stop_every_seconds: float = 0.0
    """A graceful stop, followed by a new start."""
    reshard_every_seconds: float = 0.0
    backlog: float = 0.0
    """Records that are written before the first process starts."""
    reshards_before: int = 0
    """How many times the stream is resharded before the first process starts, among a third of the records."""
    rescale_every_seconds: float = 0.0
    """UpdateShardCount is called."""
    trims: bool = False
    """About every 40 s the stream is trimmed: only records of the last half minute remain."""
    trims_unread: bool = False
    """Trims leave only the last few seconds, so some records are never read."""
    deleted: bool = False
    """The stream is deleted once, and created again a few seconds later."""
    listing_page: int = 0
    """Shards per page of ListShards: shards may change between two pages. 0: the service's default."""
    expiries_differ: bool = False
    """Each process has its own lease expiry."""
    store_outage_seconds: float = 0.0
    """How long the store is unreachable, once; 0: never."""
    roll_back_seconds: float = 0.0
    """How far the store is rolled back; 0: never."""
    roll_back_every_seconds: float = 0.0
    """0: it is rolled back once."""
    store_is_emptied: bool = False
    """The store is emptied once while the fleet is running."""
    same_worker_id: bool = False
    """All processes are configured with one worker id."""
    hand_off: Literal["keep", "force"] = "keep"
    drain_seconds: float = 30.0
    """How long a hand-off waits for running calls."""

    @property
    def work_seconds(self) -> float:
        """An upper bound for all handler calls, one after another. `overrunning` is a mean: up to three times as many
        records may overrun.
        """
        attempts = 1 + 2 * self.failing
        return self.record_count * (attempts * self.handler_seconds_max + 3 * self.overrunning * OVERRUN_SECONDS_MAX)


def fleet_options_for(seed: int) -> FleetOptions:
    """Most seeds draw every option at random. Four last digits of the seed select special fleets:

    - 1: the store is rolled back while workers are cut off, paused, stalled and stopped;
    - 3: a backlog. Reads return many records, handlers are slow, and processes crash in the middle of a page. The seeds
      take turns with consume modes and commit intervals;
    - 5: the processes are jobs that end at the tip, and some records cannot be decoded at first;
    - 7: shards are trimmed, leave the listing, and their lease rows are cleaned up. In half of these fleets everything
      is read before it is trimmed; in the others, workers must report what was lost.
    """
    options = _random_options(seed)
    if seed % 10 == 5:
        return msgspec.structs.replace(
            options, consume_mode=get_args(ConsumeMode)[seed // 10 % 5], ends_at_tip=True, undecodable=0.03
        )
    if seed % 10 == 3:
        return msgspec.structs.replace(
            options,
            consume_mode=get_args(ConsumeMode)[seed // 10 % 5],
            checkpoint_seconds=(1.0, 0.1, 3.0)[seed // 50 % 3],
            worker_count=2,
            shard_count=2,
            record_count=400,
            backlog=0.8,
            faulty_seconds=60.0,
            handler_seconds_max=0.5,
            crash_every_seconds=8.0,
            reshards_before=0,
            budget_bytes=0,
            roll_back_seconds=0.0,
            **dict.fromkeys(("deleted", "store_is_emptied"), False),
        )
    if seed % 10 == 1:
        return _roll_back_options(seed, options)
    if seed % 10 != 7:
        return options
    if seed % 20 == 17:
        return msgspec.structs.replace(
            options,
            trims=True,
            trims_unread=True,
            faulty_seconds=100.0,
            store_outage_seconds=0.0,
            roll_back_seconds=0.0,
            **dict.fromkeys(("deleted", "store_is_emptied"), False),
        )
    return msgspec.structs.replace(
        options,
        trims=True,
        faulty_seconds=100.0,
        handler_seconds_max=0.02,
        reshard_every_seconds=8.0,
        **dict.fromkeys(
            ("lost", "late", "throttled", "unavailable", "paused_starts", "overrunning", "store_outage_seconds"), 0.0
        ),
        **dict.fromkeys(
            (
                "pause_every_seconds",
                "stall_every_seconds",
                "cut_off_every_seconds",
                "crash_every_seconds",
                "roll_back_seconds",
            ),
            0.0,
        ),
        **dict.fromkeys(("deleted", "store_is_emptied"), False),
        budget_bytes=0,
    )


def _roll_back_options(seed: int, options: FleetOptions) -> FleetOptions:
    """Some workers notice the roll-back late, or start during it. All have the same lease expiry: a worker cannot wait
    for the expiry of a member that it never saw because the store lost it.
    """
    random = Random(f"roll-back {seed}")  # noqa: S311 -- a simulation's dice, not a secret
    return msgspec.structs.replace(
        options,
        worker_count=random.randrange(3, 6),
        shard_count=random.randrange(3, 9),
        record_count=400,
        key_count=40,
        faulty_seconds=60.0,
        handler_seconds_max=0.3,
        roll_back_seconds=round(random.uniform(4, 12), 1),
        roll_back_every_seconds=random.choice([0.0, 10.0, 20.0]),
        pause_every_seconds=random.choice([0.0, 15.0]),
        stall_every_seconds=random.choice([0.0, 15.0]),
        cut_off_every_seconds=random.choice([6.0, 9.0]),
        stop_every_seconds=random.choice([6.0, 15.0]),
        lost=random.choice([0.0, 0.05]),
        late=random.choice([0.0, 0.05]),
        **dict.fromkeys(("deleted", "expiries_differ", "store_is_emptied"), False),
    )


def _random_options(seed: int) -> FleetOptions:
    random = Random(f"fleet {seed}")  # noqa: S311 -- a simulation's dice, not a secret
    large = seed % 25 == 24

    def sometimes(chance: float, low: float, high: float) -> float:
        return round(random.uniform(low, high), 1) if random.random() < chance else 0.0

    deleted = random.random() < 0.08
    consume_mode: ConsumeMode = random.choice(["run", "run", "run", "run_batches", "records", "batches", "manual_ack"])
    return FleetOptions(
        consume_mode=consume_mode,
        worker_count=random.randrange(6, 13) if large else random.randrange(1, 5),
        shard_count=random.randrange(8, 33) if large else random.randrange(1, 5),
        record_count=random.randrange(100, 400),
        key_count=random.choice([3, 10, 40]),
        order=random.choice(["shard", "key", "key", "none"]),
        concurrency=random.choice([1, 4, 16]),
        loop_order=random.choice(["fifo", "fifo", "shuffle"]),
        faulty_seconds=random.uniform(20, 60) + (40 if deleted else 0),
        handler_seconds_max=random.choice([0.02, 0.1, 0.5]),
        failing=random.choice([0.0, 0.0, 0.1]),
        overrunning=random.choice([0.0, 0.0, 0.01]),
        timeout_seconds=random.choice([0.0, 1.5]),
        aggregated=random.choice([0.0, 0.0, 0.3]),
        budget_bytes=random.choice([0, 0, 1, 3_000]),
        lost=random.choice([0.0, 0.0, 0.01, 0.05]),
        late=random.choice([0.0, 0.0, 0.01, 0.05]),
        repeated=random.choice([0.0, 0.0, 0.02]),
        throttled=random.choice([0.0, 0.0, 0.05, 0.2]),
        unavailable=random.choice([0.0, 0.0, 0.05]),
        expired=random.choice([0.0, 0.0, 0.02]),
        clock_error=random.choice([0.0, 0.005, 0.01]),
        clocks_stop=random.random() < 0.2,
        pause_every_seconds=sometimes(0.4, 10, 40),
        stall_every_seconds=sometimes(0.3, 10, 40),
        paused_starts=random.choice([0.0, 0.0, 0.005]),
        cut_off_every_seconds=sometimes(0.4, 10, 40),
        crash_every_seconds=sometimes(0.4, 10, 50),
        stop_every_seconds=sometimes(0.4, 10, 50),
        reshard_every_seconds=sometimes(0.5, 8, 30),
        reshards_before=random.choice([0, 0, 0, 3, 8]),
        rescale_every_seconds=sometimes(0.15, 10, 40),
        deleted=deleted,
        hand_off=random.choice(["keep", "force"]),
        listing_page=random.choice([0, 0, 0, 1, 3]) * (10 if large else 1),
        expiries_differ=random.random() < 0.2,
        store_outage_seconds=sometimes(0.1, 3, 30),
        roll_back_seconds=sometimes(0.05, 1, 10),
        store_is_emptied=random.random() < 0.05,
        same_worker_id=random.random() < 0.1,
        drain_seconds=random.choice([30.0, 30.0, 0.1]),
    )
