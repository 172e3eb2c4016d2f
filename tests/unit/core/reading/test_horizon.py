"""What was trimmed from a stream, and whether a reader may have missed it."""

from anabranch._core.reading.service_time import TrimHorizon, may_have_lost

DAY = 24 * 3600.0


def test_the_horizon_follows_the_clock_at_a_distance_of_the_retention():
    horizon = TrimHorizon(24, 10 * DAY)
    assert horizon.at(10 * DAY) == 9 * DAY
    assert horizon.at(10 * DAY + 5) == 9 * DAY + 5


def test_the_horizon_never_goes_back():
    horizon = TrimHorizon(24, 10 * DAY)
    horizon.observe(48, 10 * DAY + 60)
    assert horizon.at(10 * DAY + 60) == 9 * DAY  # what was gone stays gone, and nothing more goes for a day
    assert horizon.at(11 * DAY + 60) == 9 * DAY + 60
    horizon.observe(24, 11 * DAY)
    assert horizon.at(11 * DAY) == 10 * DAY


def test_a_response_from_before_the_last_check_counts_by_its_own_time():
    horizon = TrimHorizon(24, 10 * DAY)
    horizon.observe(1, 10 * DAY + 60)
    assert horizon.at(10 * DAY + 30) == 10 * DAY + 30 - 3600
    assert horizon.observed_seconds == horizon.at(10 * DAY + 60) == 10 * DAY + 60 - 3600
    horizon.observe(24, 10 * DAY + 10)  # itself a late one
    assert horizon.observed_seconds == horizon.at(10 * DAY + 60) == 10 * DAY + 60 - 3600


def test_nothing_was_lost_where_all_was_read_that_has_left_the_stream_since():
    assert not may_have_lost(1_000.0, 999.9)
    assert may_have_lost(1_000.0, 1_000.0)


def test_a_reader_with_an_unknown_read_time_may_have_lost_records():
    assert may_have_lost(None, 0.0)
