"""How many workers a fleet should have."""

import pytest
from hypothesis import given, strategies as st
from msgspec.structs import replace

from anabranch._core.leases.status import HELPED_BY_WORKERS, desired_workers
from anabranch.reasons import ReadsThrottled, RecordInHandler
from anabranch.reports import FleetStatus
from fleet_samples import MEMBER, SHARD
from reason_samples import SAMPLES

THROTTLED = ReadsThrottled(error="Rate exceeded", failure_count=2)
SLOW = RecordInHandler(position="7", partition_key="a", seconds=20)


def fleet(shards=8, workers=2, lag=0.0, rate=100.0, **fields):
    return FleetStatus(
        app="billing",
        created_seconds=0.0,
        streams=("orders",),
        members=tuple(
            replace(MEMBER, member_id=f"a#{n}", records_per_second=None if rate is None else rate / workers)
            for n in range(workers)
        ),
        shards=tuple(replace(SHARD, shard_id=f"shardId-{n}", lag=lag, **fields) for n in range(shards)),
        unreported_count=0,
    )


def advise(status, **given):
    wanted = {"target_lag": 60.0, "catch_up": 300.0, "worker_rate": None, "minimum": 1, "maximum": None, **given}
    return desired_workers(status, **wanted)


@pytest.mark.parametrize(
    "status, options, workers",
    [
        (fleet(lag=10.0), {}, 2),  # within the target
        (fleet(lag=300.0), {}, 4),  # twice as many catch up in 300 s
        (fleet(lag=100.0), {}, 3),
        (fleet(lag=6_000.0), {}, 8),  # no more than shards
        (fleet(lag=6_000.0), {"maximum": 5}, 5),
        (fleet(lag=0.0, rate=0.0), {}, 1),  # nothing arrives
        (fleet(lag=0.0, rate=0.0), {"minimum": 0}, 1),  # somebody must look whether something arrives
        (fleet(lag=0.0, rate=0.0), {"minimum": 3}, 3),
        (fleet(lag=None), {}, 2),  # not known: as it is
        (fleet(shards=1, workers=3, lag=0.0), {}, 1),  # more workers than shards
        (fleet(lag=0.0, rate=100.0), {"worker_rate": 200.0}, 1),
        (fleet(lag=0.0, rate=500.0), {"worker_rate": 200.0}, 3),
        (fleet(lag=300.0, rate=500.0), {"worker_rate": 200.0}, 5),
        (fleet(shards=16, workers=8, lag=3_000.0, rate=50.0), {"worker_rate": 500.0}, 8),  # behind: not fewer than now
        (fleet(workers=4, lag=0.0, rate=None), {"worker_rate": 200.0}, 4),  # an unknown rate is not 0
        (fleet(workers=4, lag=0.0, rate=None), {}, 4),
        (fleet(workers=4, lag=None), {"worker_rate": 200.0}, 4),
        (fleet(shards=3, workers=8, lag=3_000.0, rate=50.0), {"worker_rate": 500.0}, 3),  # no more than shards
        (fleet(lag=900.0, state="stopped"), {}, 1),  # no worker helps a stopped shard
        (fleet(lag=900.0, state="stalled", reason=THROTTLED), {}, 2),  # nor one that Kinesis throttles
        (fleet(lag=300.0, state="stalled", reason=SLOW), {}, 4),
        (fleet(shards=0), {}, 1),
        (fleet(shards=0), {"minimum": 0}, 0),
    ],
)
def test_the_advice_follows_from_lag_rate_and_shards(status, options, workers):
    assert advise(status, **options).workers == workers


def test_a_limit_of_shards_for_each_worker_counts():
    status = fleet(shards=10, workers=2, lag=0.0)
    status = replace(status, members=tuple(replace(member, shards_max=3) for member in status.members))
    found = advise(status)
    assert (found.workers, found.why) == (4, "a worker takes 3 shards at most")


def test_no_live_worker_and_shards_left_is_at_least_one():
    status = replace(fleet(lag=None, state="unowned"), members=())
    assert (advise(status).workers, advise(status).live_workers) == (1, 0)
    assert advise(status, minimum=0).workers == 1


def test_the_advice_says_why():
    found = advise(fleet(lag=300.0))
    assert (found.live_workers, found.shard_count, found.lag, found.records_per_second) == (2, 8, 300.0, 100.0)
    assert found.why == "300 s behind: to catch up in 300 s"
    slow = advise(fleet(lag=300.0, rate=10.0), worker_rate=500.0)
    assert slow.why == "300 s behind: each worker handles less than worker_rate"
    assert advise(fleet(lag=0.0, rate=None)).why == "the rate is not known"


def test_the_reasons_that_more_workers_help_exist():
    assert {reason.code for reason in SAMPLES} >= HELPED_BY_WORKERS


@given(st.integers(0, 50), st.integers(1, 60), st.floats(0, 1e6) | st.none(), st.floats(0, 1e6), st.integers(0, 9))
def test_the_advice_is_within_its_bounds(shards, workers, lag, rate, minimum):
    found = advise(fleet(shards, workers, lag, rate), minimum=minimum, maximum=20).workers
    assert minimum <= found <= 20
    assert found <= max(minimum, shards)


@given(st.integers(1, 50), st.integers(1, 60), st.floats(61, 1e6), st.floats(0, 1e6), st.floats(1, 1e6) | st.none())
def test_a_fleet_that_is_behind_never_shrinks_below_its_shards(shards, workers, lag, rate, worker_rate):
    assert advise(fleet(shards, workers, lag, rate), worker_rate=worker_rate).workers >= min(workers, shards)


@given(st.integers(1, 50), st.integers(1, 60), st.floats(0, 1e6), st.floats(0, 1e6))
def test_a_larger_lag_never_asks_for_fewer_workers(shards, workers, lag, more):
    assert advise(fleet(shards, workers, lag + more)).workers >= advise(fleet(shards, workers, lag)).workers
