"""The service's time, derived from the dates of its responses."""

import pytest

from anabranch._core.reading.service_time import ServiceClock


def test_nothing_is_known_before_the_first_answer():
    assert ServiceClock().seconds(5) is None


def test_time_advances_after_a_response():
    clock = ServiceClock()
    clock.observe(1_000.0, 10_000)
    assert clock.seconds(10_000) == 1_000.0
    assert clock.seconds(12_500) == 1_002.5


def test_dates_in_whole_seconds_show_the_time_as_exactly_as_the_best_of_them():
    clock = ServiceClock()
    for now_ms in range(0, 20_000, 300):  # the true time is now_ms and 0.9 s
        clock.observe(float((now_ms + 900) // 1000), now_ms)
        assert clock.seconds(now_ms) <= (now_ms + 900) / 1000
    assert clock.seconds(20_000) == pytest.approx(20.9, abs=0.12)


def test_a_clock_that_drifts_is_followed_in_both_directions():
    for rate in (0.9999, 1.0001):
        clock = ServiceClock()
        for second in range(100_000):
            clock.observe(second * rate, second * 1000)
        assert clock.seconds(99_999_000) == pytest.approx(99_999 * rate, abs=0.01)


def test_a_clock_that_was_set_back_is_followed_at_once():
    clock = ServiceClock()
    clock.observe(1_000.0, 0)
    clock.observe(900.0, 1_000)
    assert clock.seconds(1_000) == 900.0
