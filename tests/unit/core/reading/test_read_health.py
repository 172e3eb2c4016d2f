from anabranch._core.reading.pace import TRY_AGAIN_AFTER_MS, UNHEALTHY_AFTER_MS, ReadHealth


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
