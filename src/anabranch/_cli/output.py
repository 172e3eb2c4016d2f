"""What commands print and how they end: tables, JSON, shard drawings, questions, exit codes."""

import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from anabranch._model.hash_keys import HashKeyRange
from anabranch._model.streams import Shard
from anabranch.errors import AnabranchError, ConfigurationError
from anabranch.limits import HASH_KEY_MAX

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text


DONE: Final = 0
FAILED: Final = 1
UNUSABLE: Final = 2
"""Wrong usage."""
INTERRUPTED: Final = 130
"""The shell's code for Ctrl-C."""


class CommandFailed(AnabranchError):  # noqa: N818 -- an outcome, not a bug
    """The command could not do what was asked."""


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
    """The tree branches before the name."""
    other_parent: str | None = None
    """For the child of a merge: its other parent, drawn elsewhere."""
    is_repeated: bool = False
    """Already drawn in full under its other parent."""


def lineage(shards: Iterable[Shard], drawing: Drawing = UNICODE) -> list[LineageRow]:
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
    """The hash space as `width` cells with this range filled. Neighbours touch, and every range shows."""
    start, end = (round(border * width / _SPACE) for border in (hash_key_range.start, hash_key_range.end + 1))
    start = min(start, width - 1)
    end = max(end, start + 1)
    return drawing.empty * start + drawing.filled * (end - start) + drawing.empty * (width - end)


def share(hash_key_range: HashKeyRange) -> str:
    """Its share of the hash space."""
    percent = hash_key_range.size * 100 / _SPACE
    return f"{percent:.1f}%" if percent >= 0.1 else "<0.1%"


_UNBOUNDED: Final = 4_000  # columns: never cut piped output


def make_console(*, stderr: bool = False) -> "Console":
    from rich.console import Console

    console = Console(stderr=stderr, markup=False, highlight=False, emoji=False, soft_wrap=False)
    if not console.is_terminal:
        console.width = _UNBOUNDED
    return console


def drawing_of(console: "Console") -> Drawing:
    return UNICODE if console.encoding.lower().startswith("utf") else ASCII


def styled(text: str, style: str = "") -> "Text":
    from rich.text import Text

    return Text(text, style=style, no_wrap=True, overflow="ellipsis")


def print_table(
    headings: Sequence[str],
    rows: Iterable[Sequence["Text | str"]],
    *,
    right: Sequence[str] = (),
    console: "Console | None" = None,
) -> None:
    """`right` names the right-aligned columns. Prints to standard output unless a console is given."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold", show_header=any(headings))
    for heading in headings:
        table.add_column(heading, justify="right" if heading in right else "left", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    console = console or make_console()
    if console.is_terminal:
        console.print(table)
        return
    with console.capture() as capture:
        console.print(table)
    for line in capture.get().splitlines():
        print(line.rstrip(), file=console.file)


def print_facts(facts: Iterable[tuple[str, "Text | str"]]) -> None:
    print_table(("", ""), [(styled(name, "bold"), value) for name, value in facts])


def print_json(value: Any) -> None:
    """Structs become objects; hash keys and sequence numbers are strings, as in AWS's JSON."""
    import msgspec

    print(msgspec.json.format(msgspec.json.encode(value), indent=2).decode())


def counted(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def say(line: str) -> None:
    """Prints a message to standard error."""
    print(line, file=sys.stderr, flush=True)


def confirm(question: str, *, yes: bool) -> None:
    """Returns if the user confirms; raises otherwise, or if there is no terminal to ask on."""
    if yes:
        return
    if not sys.stdin.isatty():
        raise ConfigurationError(f"{question} Not a terminal; pass --yes to confirm")
    print(f"{question} [y/N] ", end="", file=sys.stderr, flush=True)
    if sys.stdin.readline().strip().lower() not in {"y", "yes"}:
        raise CommandFailed("nothing was changed")
