import asyncio

import pytest

from anabranch._cli.connection import retry
from anabranch.errors import (
    AccessDeniedError,
    AnabranchError,
    ExpiredIteratorError,
    ThrottledError,
    TransportError,
    UnavailableError,
)


def throttled(**more):
    return ThrottledError("slow down", operation="ListShards", code="LimitExceededException", **more)


@pytest.fixture
def call(monkeypatch):
    """What comes of a call with given outcomes, how often it was tried, and the seconds between."""
    slept = []

    async def sleep(seconds):
        slept.append(seconds)

    monkeypatch.setattr("anabranch._cli.connection.asyncio.sleep", sleep)
    return lambda outcomes: (*outcome_of(outcomes), [slept.pop() for _ in slept[:]])


def outcome_of(outcomes):
    tried = []

    async def attempt():
        outcome = outcomes[len(tried)]
        tried.append(outcome)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    try:
        result = asyncio.run(retry(attempt))
    except (AnabranchError, ValueError) as error:
        result = error
    return result, len(tried)


def test_a_call_is_tried_again_until_it_succeeds(call):
    unavailable = UnavailableError("", operation="ListShards", code="InternalFailure", status=500)
    for first, second in ((throttled(), TransportError()), (TransportError(), unavailable)):
        result, tries, slept = call([first, second, "done"])
        assert (result, tries, len(slept)) == ("done", 3, 2)


def test_the_last_failure_is_raised_when_the_tries_are_used_up(call):
    failures = [throttled() for _ in range(9)]
    result, tries, _ = call(failures)
    assert result is failures[2]
    assert tries == 3


@pytest.mark.parametrize(
    "error",
    [
        AccessDeniedError("", operation="x", code="AccessDenied"),
        ExpiredIteratorError("", operation="x", code="ExpiredIteratorException"),
        ValueError("a defect"),
    ],
)
def test_what_the_same_call_cannot_mend_is_raised_at_once(call, error):
    result, tries, slept = call([error, "never"])
    assert (result, tries, slept) == (error, 1, [])


def test_what_the_service_asks_for_is_honoured_within_reason(call):
    assert call([throttled(retry_after_seconds=3), "done"])[2] == [3.0]
    assert call([throttled(retry_after_seconds=99_999), "done"])[2] == [60.0]
