"""What follows a failed handler call."""

import pytest

from anabranch.errors import ConfigurationError
from anabranch.policies import Retry, Stop


def test_the_default_ends_in_a_loud_stop():
    assert Retry().then == Stop()
    assert Retry().attempts == 3


@pytest.mark.parametrize(
    "setting, message",
    [
        ({"attempts": 0}, "attempts is 0; it must be at least 1"),
        ({"backoff": -1.0}, "backoff must not be negative"),
        ({"backoff": 5.0, "backoff_max": 1.0}, "nor larger than backoff_max"),
        ({"backoff": float("nan")}, "backoff is nan"),
        ({"timeout": 0.0}, "timeout is 0.0; it must be positive, or None for no limit"),
        ({"timeout": float("nan")}, "timeout is nan"),
    ],
)
def test_a_setting_that_makes_no_sense_is_refused_by_name(setting, message):
    with pytest.raises(ConfigurationError, match=message):
        Retry(**setting)


def test_all_violations_are_named_at_once():
    with pytest.raises(ConfigurationError) as caught:
        Retry(attempts=-1, backoff=-1.0, timeout=-1.0)
    assert len(caught.value.violations) == 3


def test_limits_that_make_sense_are_taken():
    Retry(attempts=1, backoff=0.0, backoff_max=0.0, timeout=0.1)
