"""Shards as a family tree, and hash ranges as bars: what `shards` and `reshard` draw.

A child of a merge has two parents. It stands, with its own children, under the one that comes first; under the other
there is only its name. Parents that left the stream are not drawn: their children are roots. Pure, and free of
recursion: a stream may have thousands of shards.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from anabranch._model.hash_keys import HashKeyRange
from anabranch._model.shards import Shard
from anabranch.limits import HASH_KEY_MAX

__all__ = ["ASCII", "UNICODE", "Drawing", "LineageRow", "lineage", "range_bar", "share"]

_SPACE: Final = HASH_KEY_MAX + 1


@dataclass(frozen=True, slots=True)
class Drawing:
    """The characters to draw with."""

    filled: str
    empty: str
    branch: str
    last_branch: str
    trunk: str


UNICODE: Final = Drawing(filled="█", empty="·", branch="├─", last_branch="└─", trunk="│ ")
ASCII: Final = Drawing(filled="#", empty=".", branch="|-", last_branch="`-", trunk="| ")


@dataclass(frozen=True, slots=True)
class LineageRow:
    shard: Shard
    guides: str
    """What stands before the name: the branches of the tree."""
    other_parent: str | None = None
    """For the child of a merge: the parent that it is not drawn under."""
    is_repeated: bool = False
    """Drawn in full above, under its other parent."""


def lineage(shards: Iterable[Shard], drawing: Drawing = UNICODE) -> list[LineageRow]:
    """Depth first; brothers in the order of their hash ranges."""
    by_id = {shard.shard_id: shard for shard in shards}
    children = _children(by_id)
    roots = [shard for shard in by_id.values() if not any(parent in by_id for parent in shard.parent_shard_ids)]
    rows: list[LineageRow] = []
    drawn: set[str] = set()
    # (shard, the parent it is drawn under, guides before its own branch, is it the last of its brothers)
    waiting = [(root, "", "", True) for root in sorted(roots, key=_place, reverse=True)]
    while waiting:
        shard, parent, before, is_last = waiting.pop()
        guides = "" if not parent else before + (drawing.last_branch if is_last else drawing.branch)
        others = [other for other in shard.parent_shard_ids if parent and other != parent]
        is_repeated = shard.shard_id in drawn
        rows.append(LineageRow(shard, guides, others[0] if others else None, is_repeated))
        if is_repeated:
            continue
        drawn.add(shard.shard_id)
        below = "" if not parent else before + ("  " if is_last else drawing.trunk)
        brothers = children.get(shard.shard_id, [])
        for position, child in enumerate(reversed(brothers)):
            waiting.append((child, shard.shard_id, below, position == 0))
    return rows


def _children(by_id: Mapping[str, Shard]) -> dict[str, list[Shard]]:
    children: dict[str, list[Shard]] = {}
    for shard in sorted(by_id.values(), key=_place):
        for parent in dict.fromkeys(shard.parent_shard_ids):
            children.setdefault(parent, []).append(shard)
    return children


def _place(shard: Shard) -> tuple[HashKeyRange, str]:
    return shard.hash_key_range, shard.shard_id


def range_bar(hash_key_range: HashKeyRange, width: int, drawing: Drawing = UNICODE) -> str:
    """The hash space as `width` cells, the range's own filled: neighbours meet without a gap, nothing is invisible."""
    start, end = (round(border * width / _SPACE) for border in (hash_key_range.start, hash_key_range.end + 1))
    start = min(start, width - 1)
    end = max(end, start + 1)
    return drawing.empty * start + drawing.filled * (end - start) + drawing.empty * (width - end)


def share(hash_key_range: HashKeyRange) -> str:
    """How much of the hash space it is."""
    percent = hash_key_range.size * 100 / _SPACE
    return f"{percent:.1f}%" if percent >= 0.1 else "<0.1%"
