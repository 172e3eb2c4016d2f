"""When a shard may be polled next."""

import random

import pytest

from anabranch._core.reading.pace import TRY_AGAIN_AFTER_MS, UNHEALTHY_AFTER_MS, Pace, PaceLimits, ReadHealth

MIB = 1 << 20


class Highest(random.Random):
    def random(self):
        return 1.0


def make_pace(**limits):
    return Pace(PaceLimits(**limits), 1000)


def read(pace, *, at=1000, took=10, size=100, count=1, behind=0):
    pace.on_read(started_at_ms=at, now_ms=at + took, read_bytes=size, record_count=count, behind_ms=behind)
    return pace.next_read_at_ms - at


def test_a_new_shard_is_read_at_once():
    assert make_pace().next_read_at_ms == 1000


def test_a_shard_with_records_is_read_five_times_a_second():
    assert read(make_pace()) == 200


def test_a_shard_that_is_behind_without_records_is_read_on():
    assert read(make_pace(), size=0, count=0, behind=5000) == 200


def test_a_read_that_took_longer_than_the_interval_is_followed_at_once():
    assert read(make_pace(), took=900) == 900


@pytest.mark.parametrize("size, pause_ms", [(2 * MIB // 5 - 1, 200), (MIB, 510), (MIB + 1, 511), (10 * MIB, 5010)])
def test_a_large_read_is_followed_by_the_pause_that_pays_for_it(size, pause_ms):
    assert read(make_pace(), size=size) == pause_ms


def test_a_share_of_the_quota_stretches_every_pause():
    assert read(make_pace(share=0.5)) == 400
    assert read(make_pace(share=0.5), size=MIB) == 1010
    assert read(make_pace(share=0.9)) == 223  # never a part of a millisecond too early


def test_an_idle_shard_is_read_ever_more_slowly_up_to_the_limit():
    pace = make_pace()
    assert [read(pace, size=0, count=0) for _ in range(7)] == [300, 450, 675, 1000, 1000, 1000, 1000]
    assert read(pace) == 200
    assert read(pace, size=0, count=0) == 300


def test_an_idle_shard_is_never_read_faster_than_a_busy_one():
    assert read(make_pace(share=0.1, idle_interval_ms=1000), size=0, count=0) == 2000


def test_a_slow_empty_read_is_not_followed_by_one_in_the_past():
    assert read(make_pace(), took=5000, size=0, count=0) == 5000


def test_failures_are_followed_by_doubling_pauses_up_to_the_limit():
    pace = make_pace()
    pauses = []
    for _ in range(8):
        pace.on_failure(1000, Highest())
        pauses.append(pace.next_read_at_ms - 1000)
    assert pauses == [450, 700, 1200, 2200, 4200, 8200, 10_200, 10_200]
    assert pace.failure_count == 8
    read(pace)
    assert pace.failure_count == 0
    pace.on_failure(1000, Highest())
    assert pace.next_read_at_ms == 1450


def test_a_failure_without_luck_in_jitter_still_waits_an_interval():
    pace = make_pace()
    entropy = Highest()
    entropy.random = lambda: 0.0
    pace.on_failure(1000, entropy)
    assert pace.next_read_at_ms == 1200


def test_throttled_reads_wait_no_longer_than_two_seconds_beyond_the_interval():
    pace = Pace(PaceLimits(), 0)
    for _ in range(10):
        pace.on_failure(1000, Highest(), throttled=True)
    assert pace.next_read_at_ms <= 1000 + 200 + 2000


def failing(*times_ms):
    health = ReadHealth()
    for now_ms in times_ms:
        health.failed(now_ms)
    return health


def test_a_worker_is_unwell_after_a_minute_of_failures():
    assert ReadHealth().is_good(0, holds_shards=True)
    assert failing(0, UNHEALTHY_AFTER_MS - 1).is_good(UNHEALTHY_AFTER_MS, holds_shards=True)
    assert not failing(0, UNHEALTHY_AFTER_MS).is_good(UNHEALTHY_AFTER_MS, holds_shards=True)


def test_a_single_failure_long_ago_proves_nothing():
    assert failing(0).is_good(10 * UNHEALTHY_AFTER_MS, holds_shards=True)


def test_one_read_that_succeeds_makes_it_well():
    health = failing(0, UNHEALTHY_AFTER_MS)
    health.succeeded()
    assert health.is_good(UNHEALTHY_AFTER_MS, holds_shards=True)


def test_a_worker_without_shards_may_try_again_after_five_minutes():
    health = failing(0, UNHEALTHY_AFTER_MS)
    at_ms = UNHEALTHY_AFTER_MS + TRY_AGAIN_AFTER_MS
    assert not health.is_good(at_ms - 1, holds_shards=False)
    assert not health.is_good(at_ms, holds_shards=True)
    assert health.is_good(at_ms, holds_shards=False)
    assert health.is_good(at_ms, holds_shards=True)
