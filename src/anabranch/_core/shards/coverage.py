"""Does a set of hash key ranges cover the space, and does it cover it once?

The shards open at one instant cut the hash space into ranges that touch and never overlap. A listing that does not
show that was put together from two instants, or is not complete: nothing may be concluded from it.
"""

from collections.abc import Iterable
from itertools import pairwise
from typing import Final

from anabranch._model.hash_keys import HashKeyRange
from anabranch.limits import HASH_KEY_MAX

__all__ = ["WHOLE", "gaps", "has_overlap", "overlaps"]

WHOLE: Final = HashKeyRange(0, HASH_KEY_MAX)


def overlaps(one: HashKeyRange, other: HashKeyRange) -> bool:
    return one.start <= other.end and other.start <= one.end


def gaps(ranges: Iterable[HashKeyRange], within: HashKeyRange = WHOLE) -> tuple[HashKeyRange, ...]:
    """What of `within` no range covers, in order."""
    found = []
    next_key = within.start
    for start, end in sorted(ranges):
        if start > within.end:
            break
        if start > next_key:
            found.append(HashKeyRange(next_key, start - 1))
        next_key = max(next_key, end + 1)
    if next_key <= within.end:
        found.append(HashKeyRange(next_key, within.end))
    return tuple(found)


def has_overlap(ranges: Iterable[HashKeyRange]) -> bool:
    ordered = sorted(ranges)
    return any(after.start <= before.end for before, after in pairwise(ordered))
