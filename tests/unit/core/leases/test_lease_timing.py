import pytest
from hypothesis import given, strategies as st
from msgspec.structs import replace

from anabranch._core.leases.timing import LEASE_EXPIRY_MS_MIN, lease_timing
from anabranch.errors import ConfigurationError


def test_the_defaults_are_derived_from_ten_seconds():
    timing = lease_timing()
    assert (timing.heartbeat_interval_ms, timing.call_deadline_ms, timing.fence_ms) == (2_500, 1_500, 7_000)
    assert (timing.grace_ms, timing.slack_ms, timing.poll_interval_ms) == (2_000, 500, 1_000)


@given(st.integers(LEASE_EXPIRY_MS_MIN, 600_000))
def test_every_expiry_above_the_minimum_is_safe(expiry_ms):
    timing = lease_timing(expiry_ms)
    assert timing.violations() == ()
    assert timing.fence_ms / 0.99 + timing.grace_ms + timing.slack_ms <= timing.expiry_ms / 1.01


def test_an_expiry_that_is_too_short_is_refused_with_the_minimum():
    with pytest.raises(ConfigurationError, match="must be at least 3000 ms"):
        lease_timing(2_999)


def test_all_violations_are_listed_at_once():
    bad = replace(lease_timing(), fence_ms=9_000, call_deadline_ms=3_000, slack_ms=0, poll_interval_ms=6_000)
    found = bad.violations()
    assert len(found) == 4
    assert "slack_ms is 0" in found[0]
    assert "may still run when another one starts" in found[1]
    assert "too few heartbeats before the fence" in found[2]
    assert "poll more often" in found[3]


def test_a_fence_beyond_the_inequality_by_a_millisecond_is_refused():
    timing = lease_timing()
    longest_ms = max(ms for ms in range(7_000, 8_000) if not replace(timing, fence_ms=ms).violations())
    assert longest_ms / 0.99 + 2_500 <= 10_000 / 1.01 < (longest_ms + 1) / 0.99 + 2_500


def test_large_fleets_poll_less_often():
    timing = lease_timing()
    assert [timing.poll_interval_for(count) for count in (1, 25, 26, 100)] == [1_000, 1_000, 1_040, 4_000]
