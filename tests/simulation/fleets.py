"""`python tests/simulation/fleets.py`: replays one seed's fleet of real engines, or tries fresh seeds on all cores.

--seed 42               replay one fleet and print its options
--seconds 60            try fresh seeds for this long (10 s by default)
--worlds 100000         try this many seeds, from --first on
"""

import sys
from random import Random
from typing import get_args

import msgspec
from harsh.fleet import HarshFleet
from harsh.options import ConsumeMode, HarshOptions
from seed_search import Simulation, search

from anabranch.testing.world.fleet import FleetVerdict


def run_seed(seed: int, options: HarshOptions | None = None) -> FleetVerdict:
    return HarshFleet(seed, options or fleet_options_for(seed)).run()


def fleet_options_for(seed: int) -> HarshOptions:
    """Every fourth fleet is watched. In every eighth that keeps its streams and its store, lease rows are deleted."""
    options, random = _special_options(seed), Random(f"watched {seed}")
    loses_rows = random.random() < 0.125
    if options.deleted or options.store_is_emptied or options.roll_back_seconds or options.trims:
        loses_rows = False
    if loses_rows:
        # A request to create a row that is seconds late may create one that was deleted meanwhile: nobody can tell.
        options = msgspec.structs.replace(options, late=0.0, repeated=0.0)
    return msgspec.structs.replace(
        options,
        is_watched=random.random() < 0.25,
        row_deleted_every_seconds=random.choice([5.0, 20.0]) if loses_rows else 0.0,
        settling_seconds=400.0 if loses_rows else options.settling_seconds,
    )


def _special_options(seed: int) -> HarshOptions:
    """Most seeds draw every option at random. Some last digits of the seed select special fleets:

    - 1: the store is rolled back while workers are cut off, paused, stalled and stopped;
    - 3: a backlog. Reads return many records, handlers are slow, and processes crash in the middle of a page. The seeds
      take turns with consume modes and commit intervals;
    - 5: the processes are jobs that end at the tip, and some records cannot be decoded at first;
    - 7: shards are trimmed, leave the listing, and their lease rows are cleaned up. In half of these fleets everything
      is read before it is trimmed; in the others, workers must report what was lost;
    - 6: some records are poison, handlers and the destination of dead letters have outages, and an operator goes past
      the records at which shards stop. The seeds take turns with consume modes and what follows the last attempt;
    - 4, 8 and 9: the fleet reads with fan-out. Subscriptions break inside frames, fall silent, end with errors, are
      refused or taken over, and the consumer is deleted.
    """
    options = _random_options(seed)
    if seed % 10 in {4, 8, 9}:
        return _fanout_options(seed, options)
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
    if seed % 10 == 6:
        return _poisoned_options(seed, options)
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


def _poisoned_options(seed: int, options: HarshOptions) -> HarshOptions:
    random = Random(f"poison {seed}")
    return msgspec.structs.replace(
        options,
        consume_mode=get_args(ConsumeMode)[seed // 10 % 5],
        then=("dead_letter", "skip", "stop")[seed // 50 % 3],
        poison=random.choice([0.02, 0.06]),
        handler_outage_every_seconds=random.choice([0.0, 20.0]),
        letters_down_every_seconds=random.choice([0.0, 10.0]),
        crash_every_seconds=random.choice([10.0, 25.0]),
        **dict.fromkeys(("deleted", "store_is_emptied"), False),
    )


def _fanout_options(seed: int, options: HarshOptions) -> HarshOptions:
    """Every fourth fleet has records that are trimmed, some before they are read."""
    random = Random(f"fan-out {seed}")
    trims = seed // 10 % 4 == 3
    return msgspec.structs.replace(
        options,
        read="fanout",
        broken_streams=random.choice([0.0, 0.02, 0.1, 0.3]),
        in_use=random.choice([0.0, 0.0, 0.3, 0.8]),
        taken_over_every_seconds=random.choice([0.0, 0.0, 3.0, 8.0]),
        consumer_deleted_every_seconds=random.choice([0.0, 0.0, 25.0]),
        expired=random.choice([0.0, 0.02]),
        trims=trims,
        trims_unread=trims,
        faulty_seconds=100.0 if trims else options.faulty_seconds,
        **(dict.fromkeys(("store_outage_seconds", "roll_back_seconds"), 0.0) if trims else {}),
        **(dict.fromkeys(("deleted", "store_is_emptied"), False) if trims else {}),
    )


def _roll_back_options(seed: int, options: HarshOptions) -> HarshOptions:
    """Some workers notice the roll-back late, or start during it. All have the same lease expiry: a worker cannot wait
    for the expiry of a member that it never saw because the store lost it.
    """
    random = Random(f"roll-back {seed}")
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


def _random_options(seed: int) -> HarshOptions:
    random = Random(f"fleet {seed}")
    large = seed % 25 == 24

    def sometimes(chance: float, low: float, high: float) -> float:
        return round(random.uniform(low, high), 1) if random.random() < chance else 0.0

    deleted = random.random() < 0.08
    consume_mode: ConsumeMode = random.choice(["run", "run", "run", "run_batches", "records", "batches", "manual_ack"])
    return HarshOptions(
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
        tip_reserve_bytes=random.choice([0, 600]),
    )


FLEETS = Simulation(
    "fleet",
    "python tests/simulation/fleets.py",
    run_seed,
    fleet_options_for,
    ("steps", "starts", "commits", "zombies"),
    20,
)

if __name__ == "__main__":
    sys.exit(search(FLEETS))
