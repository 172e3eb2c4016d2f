"""`ServiceClock` estimates the service's time from the Date headers of its responses."""

import pytest

from anabranch._core.reading.service_time import ServiceClock


def test_the_time_is_unknown_before_the_first_response():
    assert ServiceClock().seconds(5) is None


def test_the_time_advances_between_responses():
    clock = ServiceClock()
    clock.observe(1_000.0, 10_000)
    assert clock.seconds(10_000) == 1_000.0
    assert clock.seconds(12_500) == 1_002.5


def test_dates_in_whole_seconds_give_the_time_to_a_fraction_of_a_second_and_never_ahead_of_it():
    clock = ServiceClock()
    for now_ms in range(0, 20_000, 300):
        true_ms = now_ms + 900
        clock.observe(float(true_ms // 1000), now_ms)
        assert clock.seconds(now_ms) <= true_ms / 1000
    # The best of these dates is exact. After it, the estimate falls by at most 1 ms per second.
    assert clock.seconds(20_000) == pytest.approx(20.9, abs=0.01)


def test_a_drifting_clock_is_followed_in_both_directions():
    for rate in (0.9999, 1.0001):  # the service's seconds per second of ours
        clock = ServiceClock()
        for second in range(100_000):
            clock.observe(second * rate, second * 1000)
        assert clock.seconds(99_999_000) == pytest.approx(99_999 * rate, abs=0.01)


def test_a_clock_that_was_set_back_is_followed_at_once():
    clock = ServiceClock()
    clock.observe(1_000.0, 0)
    clock.observe(900.0, 1_000)
    assert clock.seconds(1_000) == 900.0
