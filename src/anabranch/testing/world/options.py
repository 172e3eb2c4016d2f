"""What the world of one fleet is like: sizes and faults, drawn from its seed and printed before it runs."""

from random import Random
from typing import Literal, get_args

import msgspec

__all__ = ["OVERRUN_SECONDS_MAX", "FleetOptions", "Form", "Scene", "fleet_options_for"]

Form = Literal["batches", "by_hand", "records", "run", "run_batches"]
"""How records are taken: by a handler (`run`), or by a loop of the process's own."""
Scene = Literal["crash", "cut_off", "merge", "pause", "rescale", "split", "stop"]


OVERRUN_SECONDS_MAX = 40.0


class FleetOptions(msgspec.Struct, frozen=True, kw_only=True):
    worker_count: int = 2
    shard_count: int = 2
    record_count: int = 100
    key_count: int = 10
    form: Form = "run"
    order: Literal["shard", "key", "none"] = "shard"
    concurrency: int = 8
    loop_order: Literal["fifo", "shuffle"] = "fifo"
    faulty_seconds: float = 40.0
    """Records are written, and faults strike, for so long."""
    script: tuple[tuple[float, Scene], ...] = ()
    """What happens at which second, beside what the seed draws."""
    checkpoint_seconds: float = 1.0
    """The interval between two commits."""
    settling_seconds: float = 180.0
    """Within so long after that everything must be handled, beside the time that the handlers themselves take."""
    handler_seconds_max: float = 0.5
    failing: float = 0.0
    """The share of records whose first attempt, or first two, fail."""
    ends_at_tip: bool = False
    """Processes end when they have handled all that there is, as jobs do, and are started again."""
    undecodable: float = 0.0
    """The share of records that do not decode while the faults last, so that their shards stop: a process that is
    started after that tries them again.
    """
    overrunning: float = 0.0
    """The share of records whose first attempt takes far too long, and does not end at once when it is cancelled."""
    timeout_seconds: float = 0.0
    """What one call of a handler may take; 0: as long as it likes."""
    aggregated: float = 0.0
    """The share of writes that are aggregates of up to five records."""
    budget_bytes: int = 0
    """What a process may hold beside the room of one read; 0: the default budget."""
    lost: float = 0.0
    late: float = 0.0
    repeated: float = 0.0
    throttled: float = 0.0
    """The share of Kinesis calls that are refused as over a quota."""
    unavailable: float = 0.0
    """The share of Kinesis calls that end in a 5xx."""
    expired: float = 0.0
    """The share of reads whose iterator is too old."""
    clock_error: float = 0.0
    clocks_stop: bool = False
    pauses_each: float = 0.0
    """Mean seconds between two pauses of a process; 0: none."""
    stalls_each: float = 0.0
    gaps: float = 0.0
    """The share of starts that are paused between the look at the fence and the call."""
    cuts_each: float = 0.0
    """Mean seconds between two times that a process cannot reach the store, the stream, or both."""
    crashes_each: float = 0.0
    stops_each: float = 0.0
    reshards_each: float = 0.0
    backlog: float = 0.0
    """The share of records that are written before the first process starts."""
    reshards_before: int = 0
    """How often it was resharded before the first process starts, while a third of the records were written."""
    rescales_each: float = 0.0
    """Mean seconds between two changes of the shard count as a whole."""
    trims: bool = False
    """Every forty seconds the service's clock leaps, so that only what came in the last half minute is kept."""
    trims_unread: bool = False
    """Then, only what came in the last few seconds: some of it was not read by anybody."""
    deleted: bool = False
    """The stream is deleted once, and created anew some seconds later."""
    listing_page: int = 0
    """Shards on one page of a listing, so that its pages are of different moments; 0: as many as the service gives."""
    expiries_differ: bool = False
    """Each process has a lease expiry of its own."""
    store_outage_seconds: float = 0.0
    roll_back_seconds: float = 0.0
    """How far the store goes back; 0: it does not."""
    roll_backs_each: float = 0.0
    """Mean seconds between two times that it does; 0: it happens once."""
    store_is_emptied: bool = False
    """Once, while the fleet is at work."""
    same_worker_id: bool = False
    hand_off: Literal["keep", "force"] = "keep"
    drain_seconds: float = 30.0
    """How long a hand-off waits for running calls."""

    @property
    def labour_seconds(self) -> float:
        """What the handlers take at most, should one worker call them one after another. A share of all records is a
        mean: three times as many may overrun.
        """
        attempts = 1 + 2 * self.failing
        return self.record_count * (attempts * self.handler_seconds_max + 3 * self.overrunning * OVERRUN_SECONDS_MAX)


def fleet_options_for(seed: int) -> FleetOptions:
    """One in ten is a world of long retention, in which shards leave the listing and lease rows are cleaned up. In half
    of them all is read before it falls off, so that nothing need be excused; in the others, what is not must be told.

    Another one in ten has a backlog: every read is a page of many records, each takes a while, and processes crash in
    the midst of them. The ways to take records come in turn, and so do the intervals of commits.

    A third one in ten has a store that is rolled back while its workers are in every kind of trouble.

    In a fourth one in ten the processes are jobs that end at the tip, and some records do not decode at first.
    """
    options = _drawn(seed)
    if seed % 10 == 5:
        return msgspec.structs.replace(options, form=get_args(Form)[seed // 10 % 5], ends_at_tip=True, undecodable=0.03)
    if seed % 10 == 3:
        return msgspec.structs.replace(
            options,
            form=get_args(Form)[seed // 10 % 5],
            checkpoint_seconds=(1.0, 0.1, 3.0)[seed // 50 % 3],
            worker_count=2,
            shard_count=2,
            record_count=400,
            backlog=0.8,
            faulty_seconds=60.0,
            handler_seconds_max=0.5,
            crashes_each=8.0,
            reshards_before=0,
            budget_bytes=0,
            roll_back_seconds=0.0,
            **dict.fromkeys(("deleted", "store_is_emptied"), False),
        )
    if seed % 10 == 1:
        return _rolled_back(seed, options)
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
        reshards_each=8.0,
        **dict.fromkeys(
            ("lost", "late", "throttled", "unavailable", "gaps", "overrunning", "store_outage_seconds"), 0.0
        ),
        **dict.fromkeys(("pauses_each", "stalls_each", "cuts_each", "crashes_each", "roll_back_seconds"), 0.0),
        **dict.fromkeys(("deleted", "store_is_emptied"), False),
        budget_bytes=0,
    )


def _rolled_back(seed: int, options: FleetOptions) -> FleetOptions:
    """Some workers learn late that the store was rolled back, or start just then. All have one expiry: a worker cannot
    wait for the expiry of a member that the store has forgotten before the worker saw it.
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
        roll_backs_each=random.choice([0.0, 10.0, 20.0]),
        pauses_each=random.choice([0.0, 15.0]),
        stalls_each=random.choice([0.0, 15.0]),
        cuts_each=random.choice([6.0, 9.0]),
        stops_each=random.choice([6.0, 15.0]),
        lost=random.choice([0.0, 0.05]),
        late=random.choice([0.0, 0.05]),
        **dict.fromkeys(("deleted", "expiries_differ", "store_is_emptied"), False),
    )


def _drawn(seed: int) -> FleetOptions:
    random = Random(f"fleet {seed}")  # noqa: S311 -- a simulation's dice, not a secret
    large = seed % 25 == 24

    def sometimes(chance: float, low: float, high: float) -> float:
        return round(random.uniform(low, high), 1) if random.random() < chance else 0.0

    deleted = random.random() < 0.08
    form: Form = random.choice(["run", "run", "run", "run_batches", "records", "batches", "by_hand"])
    return FleetOptions(
        form=form,
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
        pauses_each=sometimes(0.4, 10, 40),
        stalls_each=sometimes(0.3, 10, 40),
        gaps=random.choice([0.0, 0.0, 0.005]),
        cuts_each=sometimes(0.4, 10, 40),
        crashes_each=sometimes(0.4, 10, 50),
        stops_each=sometimes(0.4, 10, 50),
        reshards_each=sometimes(0.5, 8, 30),
        reshards_before=random.choice([0, 0, 0, 3, 8]),
        rescales_each=sometimes(0.15, 10, 40),
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
