"""The dice of a world: all of its chances come from one seed.

Quicker than `random.Random` itself, since a world throws them a thousand times. Not every number is exactly as likely
as the next, which does not matter here.
"""

from random import Random

__all__ = ["Dice"]


class Dice:
    __slots__ = ("bits", "random", "wait")

    def __init__(self, seed: str) -> None:
        source = Random(seed)  # noqa: S311 -- a simulation's dice, not a secret
        self.random = source.random
        """A share: from 0 to just under 1."""
        self.bits = source.getrandbits
        self.wait = source.expovariate

    def between(self, low: int, high: int) -> int:
        """From `low` to `high - 1`."""
        return low + int(self.random() * (high - low))
