"""Counters and histograms of a run."""

from hypothesis import given, strategies as st

from anabranch.measures import BOUNDS_MS, BUCKET_LAST_MS, BUCKET_OF_MS, Counters, TimeBuckets


@given(st.integers(0, 100_000))
def test_a_time_is_in_the_first_bucket_that_it_does_not_exceed(elapsed_ms):
    buckets = TimeBuckets()
    buckets.add(elapsed_ms)
    bucket = buckets.counts.index(1)
    assert all(elapsed_ms > bound for bound in BOUNDS_MS[:bucket])
    assert bucket == len(BOUNDS_MS) or elapsed_ms <= BOUNDS_MS[bucket]
    assert (buckets.count, buckets.total_ms) == (1, elapsed_ms)
    assert BUCKET_OF_MS[min(elapsed_ms, BUCKET_LAST_MS)] == bucket


def test_several_calls_share_their_time():
    buckets = TimeBuckets()
    buckets.add(100, 50)
    assert (buckets.count, buckets.total_ms, buckets.counts[1]) == (50, 100, 50)


def test_counters_add_up_and_tell_what_is_new():
    one, other = Counters(read_count=3, failed_count=1), Counters(read_count=4, handled_bytes=5)
    one.calls.add(7)
    before = one.copy()
    one.calls.add(7)
    one.read_count += 10
    assert one.since(before) == Counters(read_count=10, calls=one.calls.since(before.calls))
    total = one.plus(other)
    assert (total.read_count, total.handled_bytes, total.failed_count, total.calls.count) == (17, 5, 1, 2)
