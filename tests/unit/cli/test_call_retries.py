import asyncio
import random

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


class Clock:
    def __init__(self):
        self.slept = []

    def now_ms(self):
        return sum(self.slept)

    async def sleep_until_ms(self, at_ms):
        self.slept.append(at_ms - self.now_ms())


def throttled(**more):
    return ThrottledError("slow down", operation="ListShards", code="LimitExceededException", **more)


def call(outcomes):
    """What comes of a call with these outcomes, and how often it was tried."""
    clock, tried = Clock(), []

    async def attempt():
        outcome = outcomes[len(tried)]
        tried.append(outcome)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    try:
        result = asyncio.run(retry(attempt, clock, random.Random(1)))
    except (AnabranchError, ValueError) as error:
        result = error
    return result, len(tried), clock.slept


def test_a_call_is_tried_again_until_it_succeeds():
    unavailable = UnavailableError("", operation="ListShards", code="InternalFailure", status=500)
    for first, second in ((throttled(), TransportError()), (TransportError(), unavailable)):
        result, tries, slept = call([first, second, "done"])
        assert (result, tries, len(slept)) == ("done", 3, 2)


def test_the_last_failure_is_raised_when_the_tries_are_used_up():
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
def test_what_the_same_call_cannot_mend_is_raised_at_once(error):
    result, tries, slept = call([error, "never"])
    assert (result, tries, slept) == (error, 1, [])


def test_what_the_service_asks_for_is_honoured_within_reason():
    assert call([throttled(retry_after_seconds=3), "done"])[2] == [3_000]
    assert call([throttled(retry_after_seconds=99_999), "done"])[2] == [60_000]
