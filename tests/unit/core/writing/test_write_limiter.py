import random

from anabranch._core.writing.limiter import FACTOR_MIN, ShardPace
from anabranch.limits import MIB


def drain(pace, size_bytes, until_ms):
    """How many records of that size go within the time."""
    now_ms = count = 0
    while now_ms <= until_ms:
        open_at_ms = pace.open_at_ms(size_bytes, now_ms)
        if open_at_ms > now_ms:
            now_ms = open_at_ms
            continue
        pace.take(size_bytes)
        count += 1
    return count


def test_a_shard_takes_a_thousand_small_records_a_second_after_a_burst_of_as_many():
    assert abs(drain(ShardPace(1.0, 0), 10, 10_000) - 11_000) <= 2


def test_a_shard_takes_a_mebibyte_a_second_after_a_burst_of_ten():
    assert abs(drain(ShardPace(1.0, 0), MIB, 20_000) - 30) <= 1


def test_a_share_is_a_part_of_everything():
    assert abs(drain(ShardPace(0.5, 0), 10, 10_000) - 5_500) <= 2


def test_a_tiny_share_still_lets_a_record_pass():
    pace = ShardPace(0.0005, 0)
    assert pace.open_at_ms(100, 0) == 0


def test_a_record_of_ten_mebibytes_passes_and_leaves_a_debt():
    pace = ShardPace(0.1, 0)
    assert pace.open_at_ms(10 * MIB, 0) == 0
    pace.take(10 * MIB)
    assert 85_000 <= pace.open_at_ms(100, 0) <= 95_000


def test_a_refusal_cuts_the_rate_and_clean_seconds_bring_it_back():
    pace, entropy = ShardPace(1.0, 0), random.Random(2)
    assert pace.on_refused(0, entropy)
    assert pace.factor == 0.7
    assert 0 < pace.paused_until_ms <= 51
    assert pace.open_at_ms(10, 1) == pace.paused_until_ms
    pace.open_at_ms(10, 2_000)
    assert 0.79 < pace.factor < 0.81
    pace.open_at_ms(10, 60_000)
    assert pace.factor == 1.0


def test_refusals_of_one_call_count_once():
    pace, entropy = ShardPace(1.0, 0), random.Random(2)
    assert pace.on_refused(0, entropy)
    assert not pace.on_refused(0, entropy)
    pace.rest(0, entropy)
    assert pace.factor == 0.7
    assert pace.paused_until_ms <= 51


def test_pauses_double_while_refusals_go_on_and_are_bounded():
    pace, entropy, now_ms, pauses = ShardPace(1.0, 0), random.Random(2), 0, []
    for _ in range(20):
        pace.on_refused(now_ms, entropy)
        pauses.append(pace.paused_until_ms - now_ms)
        now_ms = pace.paused_until_ms
    assert pauses[0] <= 51
    assert max(pauses) <= 2_001
    assert min(pauses[8:]) >= 1_000
    assert pace.factor >= FACTOR_MIN
    pace.on_accepted()
    pace.on_refused(now_ms, entropy)
    assert pace.paused_until_ms - now_ms <= 51


def test_a_rest_pauses_without_slowing_down():
    pace = ShardPace(1.0, 0)
    pace.rest(0, random.Random(2))
    assert pace.paused_until_ms > 0
    assert pace.factor == 1.0


def test_a_clock_that_stands_still_fills_nothing():
    pace = ShardPace(1.0, 100)
    for _ in range(1_000):
        pace.take(1)
    assert pace.open_at_ms(1, 100) == 101
    assert pace.open_at_ms(1, 99) > 99
