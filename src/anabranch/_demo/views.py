"""How the demo looks: a river on a terminal, plain lines elsewhere, and the audit at the end.

The river: time flows down, its width is the hash space, each colour is a worker. A shard is a stretch between two
banks; grey is a shard that nobody reads at that moment. What was done to it stands in the margin.
"""

import shutil
import sys
import time
from collections import deque
from itertools import groupby
from typing import Final, NamedTuple

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from anabranch._demo.audit import Audit
from anabranch._demo.stage import ShardView, Stage
from anabranch.limits import HASH_KEY_MAX

__all__ = ["River", "audit_table", "plain_line", "what_next"]

COLOURS: Final = {"one": "cyan", "two": "magenta", "three": "yellow"}
WIDTH: Final = 50
MARGIN: Final = 15
TIME: Final = 8
ROWS_MAX: Final = 16
ROWS_MIN: Final = 4
NEWS: Final = 4
LINES_AROUND: Final = 2 + 2 + NEWS + 1 + 1  # the panel's frame, the figures, the news, the keys, and the cursor's line
NEXT: Final = (
    ("serve --create orders:4", "a local Kinesis"),
    ("put orders hello --key user-1", "writes a record"),
    ("tail orders --from horizon", "shows it"),
)
PICTURE_ROWS: Final = 24


class _Row(NamedTuple):
    seconds: float
    banks: Text
    mark: str

    def line(self) -> Text:
        line = Text().append(f"{self.seconds:5.1f} s ", style="dim").append_text(self.banks)
        return line.append(f" {self.mark}"[: MARGIN + 1], style="bold")


class River:
    def __init__(self, stage: Stage, *, keys: bool) -> None:
        self._stage = stage
        self._keys = keys
        self._rows: list[_Row] = []
        self._told_count = 0
        self._started = time.monotonic()
        self._counts: deque[tuple[float, int]] = deque(maxlen=20)

    def flow(self) -> None:
        """One more row: who reads which part of the hash space now."""
        news = self._stage.happenings[self._told_count :]
        self._told_count += len(news)
        mark = ", ".join(happening.mark for happening in news)
        self._rows.append(_Row(time.monotonic() - self._started, _banks(self._stage.shards), mark))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        height = max(ROWS_MIN, min(ROWS_MAX, console.height - LINES_AROUND))
        rows = [row.line() for row in self._rows[-height:]]
        yield _panel([*rows, *[Text("")] * (height - len(rows))])
        yield self._figures()
        yield self._news()

    def whole(self) -> RenderableType:
        """The river from its source, with as many rows as fit a picture."""
        step = -(-len(self._rows) // PICTURE_ROWS)
        groups = [self._rows[at : at + step] for at in range(0, len(self._rows), step)]
        legend = Text(" ").join(Text(f" ██ worker {name} ", style=colour) for name, colour in COLOURS.items())
        return Group(_panel([_last_of(group).line() for group in groups]), legend)

    def _figures(self) -> RenderableType:
        stage, now = self._stage, time.monotonic()
        handled = stage.handled_count
        self._counts.append((now, handled))
        since, before = self._counts[0]
        rate = (handled - before) / (now - since) if now > since else 0.0
        line = Text()
        for name, colour in COLOURS.items():
            owned = sum(shard.owner == name for shard in stage.shards)
            line.append(f" ██ worker {name}: {owned} {'shard ' if owned == 1 else 'shards'} ", style=colour)
        line.append(f"\n put {len(stage.put):6}   handled {handled:6}   waiting {len(stage.put) - handled:4}   ")
        line.append(f"{rate:6.0f} records/s")
        return line

    def _news(self) -> RenderableType:
        lines = Text()
        for happening in self._stage.happenings[-NEWS:]:
            lines.append(f" {happening.text}\n", style="bold" if happening.victim else "")
        if self._keys:
            lines.append(" keys: s split   m merge   k kill a worker   t throttle   q end", style="dim")
        return lines


def _last_of(rows: list[_Row]) -> _Row:
    """One row for several: what is so after them, and what was done in them."""
    return rows[-1]._replace(mark=next((row.mark for row in rows if row.mark), ""))


def _panel(rows: list[Text]) -> Panel:
    return Panel(
        Group(*rows),
        title="the stream: hash space across, time downwards, a colour for each worker",
        title_align="left",
        border_style="dim",
        width=TIME + WIDTH + MARGIN + 5,
    )


def _banks(shards: list[ShardView]) -> Text:
    """One row of the river. Where a closed shard is still being read, it covers its children, which wait for it."""
    cells: list[tuple[str, str]] = [("░", "bright_black")] * WIDTH
    for shard in sorted(shards, key=lambda shard: not shard.is_open):
        first = shard.start * WIDTH // (HASH_KEY_MAX + 1)
        last = max(first + 1, (shard.end + 1) * WIDTH // (HASH_KEY_MAX + 1))
        style = COLOURS.get(shard.owner or "", "bright_black")
        for column in range(first, last):
            cells[column] = ("█" if shard.owner else "░", style)
        if first:
            cells[first] = ("▐", style)
    row = Text()
    for style, run in groupby(cells, key=lambda cell: cell[1]):
        row.append("".join(character for character, _ in run), style=style)
    return row


def plain_line(stage: Stage, elapsed: float) -> str:
    owners = " ".join(f"{shard.shard_id[-2:]}:{shard.owner or '-'}" for shard in stage.shards)
    handled = stage.handled_count
    return (
        f"{elapsed:5.1f} s  put {len(stage.put):6}  handled {handled:6}  waiting {len(stage.put) - handled:4}  {owners}"
    )


def audit_table(audit: Audit) -> RenderableType:
    table = Table(title="What became of every record", title_justify="left", title_style="bold")
    table.add_column("")
    table.add_column("a plain boto3 loop", justify="right")
    table.add_column("anabranch", justify="right")
    plain, ours = audit.plain, audit.ours
    rows = (
        ("records put", plain.put, ours.put, False),
        ("handled", plain.handled, ours.handled, False),
        ("lost", plain.lost, ours.lost, True),
        ("out of order", plain.out_of_order, ours.out_of_order, True),
        ("handled again", plain.repeated, ours.repeated, False),
    )
    for name, theirs, our, must_be_zero in rows:
        table.add_row(name, _figure(theirs, must_be_zero), _figure(our, must_be_zero))
    table.add_section()
    for recovery in audit.recoveries:
        table.add_row(
            f"reading on after: {recovery.after}", _seconds(recovery.plain_seconds), _seconds(recovery.ours_seconds)
        )
    note = Text(
        "Handled again: finished, but not yet committed when its worker was killed.\nThe bound is one second of work. ",
        style="dim",
    )
    note.append(f"Seed {audit.seed}.")
    return Group(table, note)


def _program() -> str:
    """How to call the command line from here: `make demo` leaves it in .venv/bin, `python -m anabranch` runs it too."""
    if shutil.which("anabranch"):
        return "anabranch"
    return "python -m anabranch" if sys.argv[0].endswith("__main__.py") else sys.argv[0]


def what_next() -> RenderableType:
    program = _program()
    width = max(len(f"{program} {command}") for command, _ in NEXT)
    text = Text("Try next (serve prints what other terminals need):", style="dim")
    for command, meaning in NEXT:
        text.append(f"\n  {f'{program} {command}':<{width}}  ", style="bold")
        text.append(meaning, style="dim")
    return text


def _figure(value: int, must_be_zero: bool) -> Text:  # noqa: FBT001 -- read beside the rows above
    if not must_be_zero:
        return Text(f"{value}")
    return Text(f"{value}", style="green" if value == 0 else "bold red")


def _seconds(value: float | None) -> str:
    return "never" if value is None else f"{value:.1f} s"
