"""When a failed call is tried again."""

import random

import pytest

from anabranch._core.backoff import retry_in_ms
from anabranch.policies import Retry


class Highest(random.Random):
    def random(self):
        return 1.0


@pytest.mark.parametrize("failed, pause_ms", [(1, 200), (2, 400), (3, 800), (9, 30_000), (99, 30_000)])
def test_the_longest_pause_doubles_up_to_its_limit(failed, pause_ms):
    assert retry_in_ms(Retry(attempts=100), failed, Highest()) == pause_ms


def test_the_pause_is_anywhere_below_the_longest():
    entropy = random.Random(7)
    pauses = [retry_in_ms(Retry(attempts=9, backoff=1.0), 1, entropy) for _ in range(200)]
    assert 0 <= min(pauses) < 100
    assert 900 < max(pauses) <= 1000


@pytest.mark.parametrize("failed", [3, 4, 1000])
def test_after_the_last_attempt_there_is_none(failed):
    assert retry_in_ms(Retry(attempts=3), failed, random.Random(0)) is None
