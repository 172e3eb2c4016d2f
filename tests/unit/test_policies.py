"""What follows a failed handler call."""

import pytest

from anabranch.errors import ConfigurationError
from anabranch.policies import DeadLetter, Retry, Skip, Stop


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
        ({"max_age": 0}, "max_age is 0; it must be positive, or None for no limit"),
        ({"max_age": "1h"}, "max_age is '1h'; it must be a number or None"),
        ({"give_up_on": ValueError}, "give_up_on is <class 'ValueError'>; it must be a tuple of exception classes"),
        ({"give_up_on": ("ValueError",)}, "it must be a tuple of exception classes"),
        ({"then": "skip"}, "then is 'skip'; it must be of type Stop, Skip or DeadLetter"),
        ({"then": Skip}, "then is <class .*Skip'>; it must be of type Stop, Skip or DeadLetter; write Skip\\(\\)"),
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
    Retry(max_age=3600, give_up_on=(ValueError, KeyError), then=Skip())
    Retry(then=DeadLetter("sqs://failures", review="sqs://review", overflow="s3://bucket/large", per_minute=1))


@pytest.mark.parametrize(
    "setting, message",
    [
        ({"url": 5}, "url is 5; it must be a URL as text, an async function, or None"),
        ({"review": 5}, "review is 5; it must be text or None"),
        ({"overflow": print}, "overflow is <built-in function print>; it must be text or None"),
        ({"per_minute": 0}, "per_minute is 0; it must be at least 1"),
        ({"per_minute": True}, "per_minute is True; it must be a whole number"),
        ({"redact": "payload"}, "redact is 'payload'; it must be a function that takes a letter, or None"),
    ],
)
def test_dead_letters_that_make_no_sense_are_refused_by_name(setting, message):
    with pytest.raises(ConfigurationError, match=message):
        DeadLetter(**setting)
