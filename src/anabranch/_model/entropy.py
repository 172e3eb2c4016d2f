"""Randomness as an argument, so that the core imports none: `random.Random` fulfils it, and so does a simulation's."""

from typing import Protocol

__all__ = ["Entropy"]


class Entropy(Protocol):
    def random(self) -> float: ...
    def getrandbits(self, k: int, /) -> int: ...
    def randrange(self, start: int, stop: int, /) -> int: ...
