import random

import pytest

from anabranch._core.writing.limiter import FACTOR_MIN, ShardPace
from anabranch.config import ProducerSettings
from anabranch.limits import MIB


def pace_of(share=1.0, *, now_ms=0, bytes_per_second=None, records_per_second=None):
    settings = ProducerSettings(
        shard_share=share, shard_bytes_per_second=bytes_per_second, shard_records_per_second=records_per_second
    )
    return ShardPace(settings, now_ms)


def drain(pace, size_bytes, until_ms):
    """How many records of that size are sent within the time."""
    now_ms = count = 0
    while now_ms <= until_ms:
        open_at_ms = pace.open_at_ms(size_bytes, now_ms)
        if open_at_ms > now_ms:
            now_ms = open_at_ms
            continue
        pace.take(size_bytes)
        count += 1
    return count


def test_limits_of_bytes_and_records_hold_each_for_itself():
    assert abs(drain(pace_of(records_per_second=100), 10, 10_000) - 1_100) <= 2
    assert abs(drain(pace_of(bytes_per_second=100_000), 1_000, 10_000) - 1_100) <= 2
    both = pace_of(bytes_per_second=100_000, records_per_second=50)
    assert abs(drain(both, 1_000, 10_000) - 550) <= 2


def test_the_lower_of_share_and_limit_counts():
    assert abs(drain(pace_of(0.1, records_per_second=500), 10, 10_000) - 1_100) <= 2
    assert drain(pace_of(0.1, bytes_per_second=MIB), MIB, 20_000) == drain(pace_of(0.1), MIB, 20_000)


def test_a_record_that_is_larger_than_a_second_s_limit_is_sent_and_paid_for():
    pace = pace_of(bytes_per_second=1_000)
    assert pace.open_at_ms(50_000, 0) == 0
    pace.take(50_000)
    assert 49_000 <= pace.open_at_ms(1, 0) <= 51_000


def test_less_than_one_record_a_second_is_a_limit_too():
    assert 5 <= drain(pace_of(records_per_second=0.5), 10, 10_000) <= 6


def test_a_shard_takes_a_thousand_small_records_a_second_after_a_burst_of_as_many():
    assert abs(drain(pace_of(), 10, 10_000) - 11_000) <= 2


def test_a_shard_takes_a_mebibyte_a_second_after_a_burst_of_ten():
    assert abs(drain(pace_of(), MIB, 20_000) - 30) <= 1


def test_a_share_is_a_part_of_everything():
    assert abs(drain(pace_of(0.5), 10, 10_000) - 5_500) <= 2


def test_a_tiny_share_still_lets_a_record_pass():
    pace = pace_of(0.0005)
    assert pace.open_at_ms(100, 0) == 0


def test_a_record_of_ten_mebibytes_passes_and_leaves_a_debt():
    pace = pace_of(0.1)
    assert pace.open_at_ms(10 * MIB, 0) == 0
    pace.take(10 * MIB)
    assert 85_000 <= pace.open_at_ms(100, 0) <= 95_000


def test_a_refusal_cuts_the_rate_and_clean_seconds_bring_it_back():
    pace = pace_of()
    assert answer(pace, "r")
    assert pace.factor == 0.7
    assert 0 < pace.paused_until_ms <= 51
    assert pace.open_at_ms(10, 1) == pace.paused_until_ms
    pace.open_at_ms(10, 2_000)
    assert 0.79 < pace.factor < 0.81
    pace.open_at_ms(10, 60_000)
    assert pace.factor == 1.0


def test_refusals_of_one_call_count_once():
    pace = pace_of()
    assert answer(pace, "r")
    assert not answer(pace, "r")
    pace.pause(0, random.Random(2))
    assert pace.factor == 0.7
    assert pace.paused_until_ms <= 51


def answer(pace, slots, now_ms=0):
    """One response: "a" for each accepted record, "r" for each refused one."""
    for slot in slots:
        if slot == "a":
            pace.on_accepted()
        else:
            pace.refused_share.add_refused()
    return pace.on_refused(now_ms, random.Random(2), slots.count("r"))


def send(pace, count):
    for _ in range(count):
        pace.take(10)


def test_a_refusal_among_accepted_records_is_no_reason_to_rest():
    pace = pace_of()
    send(pace, 50)
    assert not answer(pace, "a" * 30 + "r" + "a" * 19)
    assert pace.paused_until_ms == 0
    assert pace.open_at_ms(10, 0) == 0
    assert pace.factor == 0.98


def test_one_refusal_in_fifty_leaves_the_rate_as_it_is_and_one_in_five_does_not():
    factors = []
    for slots in ("a" * 48 + "ra", "aaaar" * 10):
        pace = pace_of()
        for now_ms in range(0, 5_000, 100):
            pace.open_at_ms(10, now_ms)
            send(pace, 50)
            answer(pace, slots, now_ms)
        factors.append(pace.factor)
    assert factors[0] > 0.95
    assert factors[1] < 0.5


@pytest.mark.parametrize(
    "slots, rests", [("arrrr", False), ("arrrrrr", True), ("rrrrrraaa", False), ("ar" * 20 + "rr", True)]
)
def test_a_shard_rests_when_most_of_the_last_records_were_refused(slots, rests):
    pace = pace_of()
    answer(pace, "a" * 20)
    assert answer(pace, slots) is rests
    assert (pace.paused_until_ms > 0) is rests


def test_a_lone_internal_failure_is_no_reason_to_rest():
    pace = pace_of()
    answer(pace, "aaa")
    pace.refused_share.add_refused()
    pace.on_failed(0, random.Random(2))
    assert pace.paused_until_ms == 0


def test_pauses_double_while_refusals_continue_and_are_bounded():
    pace, now_ms, pauses = pace_of(), 0, []
    for _ in range(20):
        answer(pace, "r", now_ms)
        pauses.append(pace.paused_until_ms - now_ms)
        now_ms = pace.paused_until_ms
    assert pauses[0] <= 51
    assert max(pauses) <= 2_001
    assert min(pauses[8:]) >= 1_000
    assert pace.factor >= FACTOR_MIN
    assert answer(pace, "ar", now_ms)
    assert pace.paused_until_ms - now_ms <= 51


def test_a_rest_pauses_without_slowing_down():
    pace = pace_of()
    pace.pause(0, random.Random(2))
    assert pace.paused_until_ms > 0
    assert pace.factor == 1.0


def test_a_stopped_clock_fills_nothing():
    pace = pace_of(now_ms=100)
    for _ in range(1_000):
        pace.take(1)
    assert pace.open_at_ms(1, 100) == 101
    assert pace.open_at_ms(1, 99) > 99
