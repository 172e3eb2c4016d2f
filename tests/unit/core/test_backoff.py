"""When a failed call is tried again."""

import random

import pytest

from anabranch._core.backoff import backoff_ms, retry_pause_ms
from anabranch.policies import Retry


class Fixed(random.Random):
    def __init__(self, value):
        super().__init__(0)
        self._value = value

    def random(self):
        return self._value


@pytest.mark.parametrize("failures, ceiling", [(1, 100), (2, 200), (3, 400), (4, 700), (40, 700), (10_000, 700)])
def test_the_ceiling_doubles_up_to_the_limit(failures, ceiling):
    assert backoff_ms(failures, Fixed(1.0), first_ms=100, max_ms=700) == ceiling


@pytest.mark.parametrize("min_share, least", [(0.0, 0), (0.5, 200), (0.9, 360)])
def test_the_pause_is_spread_from_its_share_of_the_ceiling_to_the_ceiling(min_share, least):
    entropy = random.Random(7)
    pauses = [backoff_ms(3, entropy, first_ms=100, max_ms=1_000, min_share=min_share) for _ in range(500)]
    assert least <= min(pauses) < least + 0.1 * 400
    assert 400 - 0.1 * 400 < max(pauses) <= 400


def test_a_first_pause_of_nothing_stays_nothing():
    assert backoff_ms(5, Fixed(1.0), first_ms=0, max_ms=0) == 0


class Highest(random.Random):
    def random(self):
        return 1.0


@pytest.mark.parametrize("failed, pause_ms", [(1, 200), (2, 400), (3, 800), (9, 30_000), (99, 30_000)])
def test_the_longest_pause_doubles_up_to_its_limit(failed, pause_ms):
    assert retry_pause_ms(Retry(), failed, Highest()) == pause_ms


def test_the_pause_is_anywhere_below_the_longest():
    entropy = random.Random(7)
    pauses = [retry_pause_ms(Retry(backoff=1.0), 1, entropy) for _ in range(200)]
    assert 0 <= min(pauses) < 100
    assert 900 < max(pauses) <= 1000
