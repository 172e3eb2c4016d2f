"""How commands speak: data on standard output, as tables for people or as JSON for programs; else on standard error.

Colours only on terminals, and not with NO_COLOR. What is piped is neither coloured nor cut to a width. Characters
beyond ASCII only where the output can carry them.
"""

import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Final

from anabranch._cli.lineage import ASCII, UNICODE, Drawing
from anabranch._cli.outcomes import CommandFailed
from anabranch.errors import ConfigurationError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

__all__ = [
    "confirm",
    "counted",
    "drawing_of",
    "make_console",
    "print_facts",
    "print_json",
    "print_table",
    "say",
    "styled",
]

_UNBOUNDED: Final = 4_000  # columns: what is piped is never cut


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
    """`right` names the headings whose columns are numbers. On standard output, unless another console is given."""
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
    """Structs become objects with their fields' names; hash keys and sequence numbers are texts, as in AWS's own."""
    import msgspec

    print(msgspec.json.format(msgspec.json.encode(value), indent=2).decode())


def counted(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def say(line: str) -> None:
    """To the person, beside the data."""
    print(line, file=sys.stderr, flush=True)


def confirm(question: str, *, yes: bool) -> None:
    """Returns if it may be done. Nobody is asked where nobody can answer."""
    if yes:
        return
    if not sys.stdin.isatty():
        raise ConfigurationError(f"{question} Nobody is here to answer: add --yes to go on without being asked")
    print(f"{question} [y/N] ", end="", file=sys.stderr, flush=True)
    if sys.stdin.readline().strip().lower() not in {"y", "yes"}:
        raise CommandFailed("nothing was changed")
