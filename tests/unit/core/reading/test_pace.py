"""How long a poller pauses after each read of a shard, and when a worker counts as unable to read."""

import random

import pytest

from anabranch._core.reading.pace import TRY_AGAIN_AFTER_MS, UNHEALTHY_AFTER_MS, Pace, PaceLimits, ReadHealth

MIB = 1 << 20


class FullJitter(random.Random):
    """Makes every pause with jitter as long as it can be."""

    def random(self):
        return 1.0


class NoJitter(random.Random):
    def random(self):
        return 0.0


def make_pace(**limits):
    """A shard that may be read from the time 1000 on."""
    return Pace(PaceLimits(**limits), 1000)


def pause_after_read(pace, *, at=1000, took=10, size=100, count=1, behind=0):
    """Reports a read, and returns the time from its start to the start of the next one. All times are in ms."""
    pace.on_read(started_at_ms=at, now_ms=at + took, read_bytes=size, record_count=count, behind_ms=behind)
    return pace.next_read_at_ms - at


def test_a_new_shard_is_read_at_once():
    assert make_pace().next_read_at_ms == 1000


def test_a_shard_with_records_is_read_five_times_a_second():
    assert pause_after_read(make_pace()) == 200


def test_a_shard_that_is_behind_is_read_five_times_a_second_even_if_a_read_was_empty():
    assert pause_after_read(make_pace(), size=0, count=0, behind=5000) == 200


def test_after_a_read_that_took_longer_than_the_interval_the_next_one_follows_at_once():
    assert pause_after_read(make_pace(), took=900) == 900


# At 2 MiB per second, 1 MiB needs 500 ms from the end of the read, which took 10 ms.
@pytest.mark.parametrize("size, pause_ms", [(2 * MIB // 5 - 1, 200), (MIB, 510), (MIB + 1, 511), (10 * MIB, 5010)])
def test_after_a_large_read_the_pause_keeps_to_two_mebibytes_a_second(size, pause_ms):
    assert pause_after_read(make_pace(), size=size) == pause_ms


def test_with_a_share_of_the_quota_every_pause_is_longer():
    assert pause_after_read(make_pace(share=0.5)) == 400
    assert pause_after_read(make_pace(share=0.5), size=MIB) == 1010
    assert pause_after_read(make_pace(share=0.9)) == 223  # 222.2, rounded up: a read is never too early


def test_the_pauses_of_an_idle_shard_grow_up_to_the_limit():
    pace = make_pace()
    assert [pause_after_read(pace, size=0, count=0) for _ in range(7)] == [300, 450, 675, 1000, 1000, 1000, 1000]
    assert pause_after_read(pace) == 200
    assert pause_after_read(pace, size=0, count=0) == 300


def test_an_idle_shard_is_never_read_faster_than_a_busy_one():
    assert pause_after_read(make_pace(share=0.1, idle_interval_ms=1000), size=0, count=0) == 2000


def test_after_a_slow_empty_read_the_next_one_is_due_at_its_end_and_not_before():
    assert pause_after_read(make_pace(), took=5000, size=0, count=0) == 5000


def test_failures_are_followed_by_doubling_pauses_up_to_the_limit():
    pace = make_pace()
    pauses = []
    for _ in range(8):
        pace.on_failure(1000, FullJitter())
        pauses.append(pace.next_read_at_ms - 1000)
    # The normal interval of 200 ms, and a backoff from 250 ms to 10 s.
    assert pauses == [450, 700, 1200, 2200, 4200, 8200, 10_200, 10_200]
    assert pace.failure_count == 8
    pause_after_read(pace)
    assert pace.failure_count == 0
    pace.on_failure(1000, FullJitter())
    assert pace.next_read_at_ms == 1450


def test_even_with_no_jitter_the_pause_after_a_failure_is_a_normal_interval():
    pace = make_pace()
    pace.on_failure(1000, NoJitter())
    assert pace.next_read_at_ms == 1200


def test_throttled_reads_wait_no_longer_than_two_seconds_beyond_the_interval():
    pace = Pace(PaceLimits(), 0)
    for _ in range(10):
        pace.on_failure(1000, FullJitter(), throttled=True)
    assert pace.next_read_at_ms <= 1000 + 200 + 2000  # from 1000: the interval and the longest backoff


def health_after_failures_at(*times_ms):
    health = ReadHealth()
    for now_ms in times_ms:
        health.failed(now_ms)
    return health


def test_a_worker_is_unhealthy_after_a_minute_of_failures():
    assert ReadHealth().is_healthy(0, holds_shards=True)
    assert health_after_failures_at(0, UNHEALTHY_AFTER_MS - 1).is_healthy(UNHEALTHY_AFTER_MS, holds_shards=True)
    assert not health_after_failures_at(0, UNHEALTHY_AFTER_MS).is_healthy(UNHEALTHY_AFTER_MS, holds_shards=True)


def test_a_single_failure_long_ago_does_not_make_a_worker_unhealthy():
    assert health_after_failures_at(0).is_healthy(10 * UNHEALTHY_AFTER_MS, holds_shards=True)


def test_one_successful_read_makes_a_worker_healthy_again():
    health = health_after_failures_at(0, UNHEALTHY_AFTER_MS)
    health.succeeded()
    assert health.is_healthy(UNHEALTHY_AFTER_MS, holds_shards=True)


def test_an_unhealthy_worker_without_shards_counts_as_healthy_again_after_five_minutes():
    health = health_after_failures_at(0, UNHEALTHY_AFTER_MS)
    at_ms = UNHEALTHY_AFTER_MS + TRY_AGAIN_AFTER_MS
    assert not health.is_healthy(at_ms - 1, holds_shards=False)
    assert not health.is_healthy(at_ms, holds_shards=True)
    assert health.is_healthy(at_ms, holds_shards=False)
    assert health.is_healthy(at_ms, holds_shards=True)  # it may hold shards again, to try
