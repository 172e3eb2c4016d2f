import asyncio
import random

import pytest

from anabranch._cli.connection import Retries, RetryBudget, RetryPolicy
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


def call(outcomes, *, policy=None, budget=None, seed=1):
    """What comes of a call with these outcomes, and how often it was tried."""
    clock, tried = Clock(), []

    async def attempt():
        outcome = outcomes[len(tried)]
        tried.append(outcome)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    retries = Retries(clock, random.Random(seed), policy=policy, budget=budget)
    try:
        result = asyncio.run(retries.call(attempt))
    except (AnabranchError, ValueError) as error:
        result = error
    return result, len(tried), clock.slept


def test_a_call_is_tried_again_until_it_succeeds():
    unavailable = UnavailableError("", operation="ListShards", code="InternalFailure", status=500)
    result, tries, slept = call([throttled(), TransportError(), unavailable, "done"])
    assert (result, tries, len(slept)) == ("done", 4, 3)


def test_the_last_failure_is_raised_when_the_tries_are_used_up():
    failures = [throttled() for _ in range(9)]
    result, tries, _ = call(failures, policy=RetryPolicy(attempts_max=3))
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


def test_delays_are_jittered_in_full_under_a_ceiling_that_doubles():
    policy, chance = RetryPolicy(first_delay_ms=100, delay_ms_max=1_000), random.Random(7)
    for failures, ceiling in ((1, 100), (2, 200), (3, 400), (5, 1_000), (400, 1_000)):
        delays = [policy.delay_ms(failures, chance) for _ in range(500)]
        assert 0 <= min(delays) < ceiling * 0.05
        assert ceiling * 0.95 < max(delays) <= ceiling


def test_what_the_service_asks_for_is_honoured_within_reason():
    assert call([throttled(retry_after_seconds=3), "done"])[2] == [3_000]
    assert call([throttled(retry_after_seconds=99_999), "done"])[2] == [60_000]


def test_a_budget_that_is_spent_allows_no_retry_until_successes_have_earned_some():
    budget = RetryBudget(10)
    assert call([throttled(), throttled(), "done"], budget=budget)[:2] == ("done", 3)
    assert budget.tokens == 1
    failure = throttled()
    assert call([failure, "never"], budget=budget)[:2] == (failure, 1)
    for _ in range(20):
        call(["done"], budget=budget)
    assert budget.tokens == 10
    assert call([TransportError(), "done"], budget=budget)[0] == "done"
    assert budget.tokens == 1
