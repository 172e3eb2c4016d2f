"""Law: whatever reads bring and however long they take, a shard is polled within its quota, or a share of it."""

import random

from hypothesis import given, strategies as st

from anabranch._core.reading.pace import PAUSE_FIRST_MS, PAUSE_MAX_MS, Pace, PaceLimits
from anabranch.limits import GET_RECORDS_BYTES_MAX, SHARD_READ_BYTES_PER_SECOND, SHARD_READS_PER_SECOND

SHARES = st.sampled_from([1.0, 0.9, 0.7, 0.5, 0.3, 0.1])
SIZES = st.just(0) | st.integers(1, 1000) | st.integers(1, GET_RECORDS_BYTES_MAX)
READS = st.lists(st.tuples(SIZES, st.integers(0, 1500), st.booleans()), min_size=1, max_size=40)
"""Bytes, milliseconds that the read takes, and whether it fails."""


def timetable(share, reads, seed, behind_ms=0):
    """When each read started and what it brought, if each is made as soon as it may be."""
    pace, entropy, made = Pace(PaceLimits(share=share), 0), random.Random(seed), []
    for size, took_ms, fails in reads:
        started = pace.next_read_at_ms
        if fails:
            made.append((started, 0))
            pace.on_failure(started + took_ms, entropy)
        else:
            made.append((started, size))
            pace.on_read(
                started_at_ms=started,
                now_ms=started + took_ms,
                read_bytes=size,
                record_count=1 if size else 0,
                behind_ms=behind_ms,
            )
        assert pace.next_read_at_ms >= started + took_ms
    return made


@given(share=SHARES, reads=READS, seed=st.integers(0, 2**32))
def test_no_second_has_more_reads_than_the_quota_allows(share, reads, seed):
    made = timetable(share, reads, seed)
    for start, _ in made:
        # Over any window of some seconds, since a share may come to less than one read a second.
        for seconds in (1, 2, 10):
            inside = [at for at, _ in made if start <= at < start + 1000 * seconds]
            assert len(inside) <= SHARD_READS_PER_SECOND * share * seconds + 1
            assert share != 1.0 or len(inside) <= SHARD_READS_PER_SECOND * seconds


@given(share=SHARES, reads=READS, seed=st.integers(0, 2**32))
def test_no_second_has_more_bytes_than_the_quota_and_one_read_above_it(share, reads, seed):
    made = timetable(share, reads, seed)
    for start, _ in made:
        inside = [size for at, size in made if start <= at < start + 1000]
        assert sum(inside[:-1]) <= SHARD_READ_BYTES_PER_SECOND * share


@given(share=SHARES, count=st.integers(1, 20), idle_interval_ms=st.integers(200, 60_000))
def test_an_idle_shard_is_read_ever_more_slowly_up_to_the_limit(share, count, idle_interval_ms):
    pace, pauses = Pace(PaceLimits(share=share, idle_interval_ms=idle_interval_ms), 0), []
    for _ in range(count):
        started = pace.next_read_at_ms
        pace.on_read(started_at_ms=started, now_ms=started, read_bytes=0, record_count=0, behind_ms=0)
        pauses.append(pace.next_read_at_ms - started)
    shortest = 1000 / (SHARD_READS_PER_SECOND * share)
    assert pauses == sorted(pauses)
    assert all(shortest <= pause <= max(idle_interval_ms, shortest + 1) for pause in pauses)
    if count == 20:
        assert pauses[-1] >= idle_interval_ms


@given(failures=st.integers(1, 60), seed=st.integers(0, 2**32))
def test_failures_are_waited_out_within_doubling_bounds(failures, seed):
    pace, entropy = Pace(PaceLimits(), 0), random.Random(seed)
    for number in range(failures):
        pace.on_failure(5000, entropy)
        longest = min(PAUSE_MAX_MS, PAUSE_FIRST_MS * 2**number)
        assert 200 <= pace.next_read_at_ms - 5000 <= 200 + longest
    assert pace.failure_count == failures
