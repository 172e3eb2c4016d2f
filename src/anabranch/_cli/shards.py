"""`anabranch shards`: the shards of a stream as a tree of their lineage, with hash ranges as bars."""

import argparse
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from anabranch._cli.connection import connect
from anabranch._cli.options import add_aws_options, add_json_option, add_stream_argument
from anabranch._cli.output import (
    DONE,
    Drawing,
    counted,
    drawing_of,
    make_console,
    print_json,
    print_table,
    range_bar,
    share,
    show,
    styled,
)
from anabranch._model.hash_keys import HashKeyRange
from anabranch._model.streams import Shard

if TYPE_CHECKING:
    from rich.text import Text


@dataclass(frozen=True, slots=True)
class LineageRow:
    shard: Shard
    guides: str
    """The tree branches before the name."""
    other_parent: str | None = None
    """For the child of a merge: its other parent, drawn elsewhere."""
    is_repeated: bool = False
    """Already drawn in full under its other parent."""


def lineage(shards: Iterable[Shard], drawing: Drawing) -> list[LineageRow]:
    """Depth first; siblings in the order of their hash ranges."""
    by_id = {shard.shard_id: shard for shard in shards}
    children = _children(by_id)
    roots = [shard for shard in by_id.values() if not any(parent in by_id for parent in shard.parent_shard_ids)]
    rows: list[LineageRow] = []
    drawn: set[str] = set()
    # (shard, the parent it is drawn under, guides before its own branch, is it the last sibling)
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
        siblings = children.get(shard.shard_id, [])
        for position, child in enumerate(reversed(siblings)):
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


_EXAMPLES: Final = """\
examples:
  anabranch shards orders
  anabranch shards orders --open --json | jq -r '.[].shard_id'

A child of a merge is drawn under its first parent; the other shows only its
name. AWS does not list parents that are past the stream's retention.
"""

_BAR_CELLS: Final = (12, 48)
_OTHER_COLUMNS: Final = 18  # share, state, and the space between columns


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = _EXAMPLES
    add_stream_argument(parser)
    parser.add_argument("--open", action="store_true", help="only open shards, in the order of their hash ranges")
    add_json_option(parser)
    add_aws_options(parser)


def run(arguments: argparse.Namespace) -> int:
    with connect(arguments, arguments.stream) as connection:
        summary = connection.run(connection.summary(arguments.stream))
        shards = connection.run(connection.shards(arguments.stream))
    counts = f"{sum(shard.is_open for shard in shards)} open of {counted(len(shards), 'shard')}"
    if arguments.open:
        shards = sorted((shard for shard in shards if shard.is_open), key=lambda shard: shard.hash_key_range)
    if arguments.json:
        print_json([_document(shard) for shard in shards])
        return DONE
    show(f"{summary.name}: {summary.status}, {counts}")
    drawing = drawing_of(make_console())
    rows = [LineageRow(shard, "") for shard in shards] if arguments.open else lineage(shards, drawing)
    _print_rows(rows)
    return DONE


def _document(shard: Shard) -> dict[str, Any]:
    """A shard as --json prints it."""
    ending = shard.ending_sequence_number
    return {
        "shard_id": shard.shard_id,
        "is_open": shard.is_open,
        "parent_shard_ids": shard.parent_shard_ids,
        "starting_hash_key": str(shard.hash_key_range.start),
        "ending_hash_key": str(shard.hash_key_range.end),
        "starting_sequence_number": str(shard.starting_sequence_number),
        "ending_sequence_number": None if ending is None else str(ending),
    }


def _print_rows(rows: list[LineageRow]) -> None:
    console = make_console()
    drawing = drawing_of(console)
    name_columns = max((len(row.guides) + len(row.shard.shard_id) for row in rows), default=0)
    narrowest, widest = _BAR_CELLS
    cells = max(narrowest, min(widest, console.width - name_columns - _OTHER_COLUMNS))

    def cell(row: LineageRow) -> tuple["Text | str", ...]:
        shard = row.shard
        name = styled("").append(row.guides, "dim").append(shard.shard_id, "" if shard.is_open else "dim")
        if row.is_repeated:
            return name, styled(f"above, under {row.other_parent}", "dim"), "", ""
        bar = styled(range_bar(shard.hash_key_range, cells, drawing), "green" if shard.is_open else "dim")
        return name, bar, share(shard.hash_key_range), styled("open" if shard.is_open else "closed")

    print_table(("SHARD", "HASH RANGE", "SHARE", "STATE"), [cell(row) for row in rows], right=("SHARE",))
