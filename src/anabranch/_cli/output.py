"""What commands print and how they end: tables, JSON, progress, questions, exit codes.

Only this module writes to standard output and standard error, and it writes nothing that `clean` has not seen.
"""

import io
import logging
import re
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import IO, TYPE_CHECKING, Any, Final, cast

from anabranch.errors import AnabranchError, ConfigurationError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text


DONE: Final = 0
FAILED: Final = 1
WRONG_USAGE: Final = 2
INTERRUPTED: Final = 130
"""The shell's code for Ctrl-C."""


class CommandFailed(AnabranchError):  # noqa: N818 -- an outcome, not a bug
    """The command could not do what was asked."""


class OutputFailed(Exception):  # noqa: N818 -- an outcome, not a bug
    """Standard output cannot be written: it is closed, or its device is full."""


_HOSTILE: Final = re.compile("[\x00-\x08\x0a-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")
"""Control characters except the tab, line separators, and marks that change the direction of text."""
_UNBOUNDED: Final = 4_000  # columns: never cut piped output
_PROSE_COLUMNS_MAX: Final = 100
_NAME_COLUMNS_MIN: Final = 8
_LISTED_MAX: Final = 10


def clean(text: str) -> str:
    """Escapes control characters and marks that reorder text. Everything printed passes through here, because keys,
    payloads, worker ids and error messages are untrusted.
    """
    return _HOSTILE.sub(lambda found: repr(found[0])[1:-1], text)


def one_line(text: object) -> str:
    return " ".join(str(text).split())


def show(line: str = "") -> None:
    """Prints one line of data to standard output."""
    _StandardOutput().write(f"{clean(line)}\n")


def show_lines(lines: Iterable[str]) -> None:
    """Prints lines unchanged and flushes them. The caller has cleaned them where necessary."""
    _StandardOutput().write("".join(f"{line}\n" for line in lines))
    flush()


class CleanFormatter(logging.Formatter):
    """Keeps each message on one line. The lines of a traceback are indented, so that none looks like a message."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 -- the name in logging
        return clean(super().formatMessage(record))

    def formatException(self, ei: Any) -> str:  # noqa: N802 -- the name in logging
        return "\n".join(f"  {clean(line)}" for line in super().formatException(ei).split("\n"))


class _DiscardingFile(io.FileIO):
    """A file that discards what it cannot write."""

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except OSError:
            return len(data)


def prepare_streams() -> None:
    """Text that cannot be encoded, or a full standard error, must not change a command's exit code. Log messages are
    cleaned even if a command configures no logging.
    """
    if sys.stderr is not None:
        buffer = io.BufferedWriter(_DiscardingFile(sys.stderr.fileno(), "w", closefd=False))
        sys.stderr = io.TextIOWrapper(buffer, sys.stderr.encoding, "backslashreplace", line_buffering=True)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    if logging.lastResort is not None:
        logging.lastResort.setFormatter(CleanFormatter())


def say(line: str) -> None:
    """Prints one line to standard error."""
    if sys.stderr is not None:
        print(clean(line), file=sys.stderr, flush=True)


def say_traceback(error: BaseException, trace: TracebackType | None) -> None:
    for line in "".join(traceback.format_exception(type(error), error, trace)).rstrip("\n").split("\n"):
        say(line)


def json_text(value: Any, *, indent: int = -1) -> str:
    """Structs become objects. Hostile characters are escaped, which JSON allows everywhere in a string."""
    import msgspec

    text = msgspec.json.format(msgspec.json.encode(value), indent=indent).decode()
    return _HOSTILE.sub(lambda found: found[0] if found[0] == "\n" else f"\\u{ord(found[0]):04x}", text)


def print_json(value: Any) -> None:
    """Hash keys and sequence numbers are strings, as in AWS's JSON."""
    show_lines([json_text(value, indent=2)])


class _StandardOutput:
    """Raises `OutputFailed` if it cannot be written. Keeps the stream, because rich's `Live` replaces `sys.stdout`."""

    def __init__(self) -> None:
        self._stream = sys.stdout

    def write(self, text: str) -> None:
        if self._stream is None:
            raise OutputFailed("standard output is closed")
        with _output_errors():
            self._stream.write(text)

    def flush(self) -> None:
        with _output_errors():
            if self._stream is not None:
                self._stream.flush()

    @property
    def encoding(self) -> str:
        return getattr(self._stream, "encoding", None) or "utf-8"

    def isatty(self) -> bool:
        return self._stream is not None and self._stream.isatty()


@contextmanager
def _output_errors() -> Iterator[None]:
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        raise OutputFailed(f"cannot write to standard output: {error.strerror}") from error


def flush() -> None:
    _StandardOutput().flush()


def make_console(*, stderr: bool = False) -> "Console":
    from rich.console import Console, ConsoleOptions, RenderableType
    from rich.segment import Segment

    class CleanConsole(Console):
        """Cleans everything that it renders."""

        def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterator[Segment]:
            for segment in super().render(renderable, options):
                text = "\n".join(clean(line) for line in segment.text.split("\n"))
                yield segment if segment.control else segment._replace(text=text)

    file = None if stderr else cast("IO[str]", _StandardOutput())
    console = CleanConsole(file=file, stderr=stderr, markup=False, highlight=False, emoji=False, soft_wrap=False)
    if not console.is_terminal:
        console.width = _UNBOUNDED
    return console


def styled(text: str, style: str = "") -> "Text":
    from rich.text import Text

    return Text(clean(text).replace("\t", "\\t"), style=style, no_wrap=True, overflow="ellipsis")


def wrapped(text: str, console: "Console", *, indent: str = "", hanging: str = "") -> list[str]:
    """Cleans the text. On a terminal it is wrapped between words, elsewhere it stays one line. `hanging` indents the
    lines after the first.
    """
    from rich.text import Text

    text = clean(text)
    if not console.is_terminal:
        return [f"{indent}{text}"]
    room = max(20, min(_PROSE_COLUMNS_MAX, console.width) - len(indent) - len(hanging))
    first, *others = Text(text).wrap(console, room, overflow="fold")
    return [f"{indent}{first.plain.rstrip()}", *(f"{indent}{hanging}{line.plain.rstrip()}" for line in others)]


def table_lines(
    headings: Sequence[str],
    rows: Iterable[Sequence["Text | str"]],
    console: "Console",
    *,
    right: Sequence[str] = (),
) -> list["Text"]:
    """A table. `right` names the right-aligned columns.

    If it is too wide for the terminal, the longest cells are shortened in the middle. A last column that is
    left-aligned is never shortened: if it does not fit, it goes on a line of its own.
    """
    titles = [styled(heading, "bold") for heading in headings]
    table = [[cell if not isinstance(cell, str) else styled(cell) for cell in row] for row in rows]
    table = [titles, *table] if any(headings) else table
    width = console.width if console.is_terminal else _UNBOUNDED
    aligned = len(headings) if headings[-1] in right else len(headings) - 1
    widths = [max((row[column].cell_len for row in table), default=0) for column in range(aligned)]
    while (excess := sum(widths) + 2 * (aligned - 1) - width) > 0 and max(widths) > _NAME_COLUMNS_MIN:
        widest = widths.index(max(widths))
        widths[widest] = max(_NAME_COLUMNS_MIN, widths[widest] - excess)
    lines: list[Text] = []
    for row in table:
        line = styled("")
        for column, (cell, columns) in enumerate(zip(row[:aligned], widths, strict=True)):
            cut = _cut(cell, columns)
            padding = " " * (columns - cut.cell_len)
            is_right = headings[column] in right
            line.append("  " if column else "").append(padding if is_right else "").append_text(cut)
            line.append("" if is_right else padding)
        lines += _with_last(line, row[aligned:], width)
    return lines


def _with_last(line: "Text", last: Sequence["Text"], width: int) -> list["Text"]:
    if not last:
        return [line]
    (cell,) = last
    if line.cell_len + 2 + cell.cell_len <= width or not cell.plain:
        line.append("  ").append_text(cell)
        line.rstrip()
        return [line]
    line.rstrip()
    below = styled("  ").append_text(cell)
    below.no_wrap, below.overflow = False, "fold"
    return [line, below]


def _cut(cell: "Text", columns: int) -> "Text":
    """Cuts out the middle: names that begin alike often end differently."""
    from rich.cells import cell_len

    if cell.cell_len <= columns:
        return cell
    head = cell.copy()
    head.truncate(columns // 2, overflow="crop")
    room = columns - 1 - head.cell_len
    start = next(place for place in range(len(cell)) if cell_len(cell.plain[place:]) <= room)
    return head.append("…").append_text(cell[start:])


def print_table(
    headings: Sequence[str],
    rows: Iterable[Sequence["Text | str"]],
    *,
    right: Sequence[str] = (),
    console: "Console | None" = None,
) -> None:
    """Prints to standard output unless a console is given."""
    console = console or make_console()
    for line in table_lines(headings, rows, console, right=right):
        console.print(line)


def print_facts(facts: Iterable[tuple[str, "Text | str"]]) -> None:
    print_table(("", ""), [(styled(name, "bold"), value) for name, value in facts])


def counted(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _LISTED_MAX} more" if len(names) > _LISTED_MAX else ""
    return f"{', '.join(names[:_LISTED_MAX])}{more}"


def confirm(question: str, *, yes: bool) -> None:
    """Returns if the user confirms; raises otherwise, or if there is no terminal to ask on."""
    if yes:
        return
    if sys.stdin is None or sys.stderr is None or not sys.stdin.isatty():
        raise ConfigurationError(f"{question} Not a terminal; pass --yes to confirm")
    print(f"{clean(question)} [y/N] ", end="", file=sys.stderr, flush=True)
    if sys.stdin.readline().strip().lower() not in {"y", "yes"}:
        raise CommandFailed("nothing was changed")


Report = Callable[[float, str], None]
"""Called with the fraction done (0 to 1) and the current step."""


@contextmanager
def progress(title: str) -> Iterator[Report]:
    """Progress on standard error while a command waits: a bar on a terminal, elsewhere a line when the step changes."""
    console = make_console(stderr=True)
    last_text = ""

    def print_step(_: float, text: str) -> None:
        nonlocal last_text
        if text != last_text:
            last_text = text
            say(f"{title}: {text}")

    try:
        if console.is_terminal:
            with _bar(title, console) as report:
                yield report
        else:
            yield print_step
    except KeyboardInterrupt:
        say(f"{title}: stopped waiting; Kinesis continues the change")
        raise


@contextmanager
def _bar(title: str, console: "Console") -> Iterator[Report]:
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}", markup=False), BarColumn(bar_width=30), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as bars:
        task = bars.add_task(title, total=1.0)
        yield lambda done, text: bars.update(task, completed=done, description=f"{title}: {text}")
