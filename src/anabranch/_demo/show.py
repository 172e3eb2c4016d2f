"""What the demo shows: a river on a terminal, plain lines elsewhere, and the audit at the end.

In the river, time flows down and the width is the hash space. Each colour is a worker; grey is a shard that nobody
reads at that moment. The margin says what was done to the stream.
"""

import asyncio
import contextlib
import io
import logging
import re
import shutil
import sys
import time
from collections import deque
from itertools import groupby
from pathlib import Path
from typing import Final, NamedTuple

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from anabranch._demo.audit import Audit, Recovery, judge, recovery_seconds
from anabranch._demo.keyboard import listen
from anabranch._demo.stage import KEYS, STORY, ShardView, Stage
from anabranch._engine.tasks import single_cause
from anabranch.limits import HASH_KEY_MAX

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
        """Adds a row: who reads which part of the hash space now."""
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
        """The whole river, reduced to the rows of a picture."""
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
    """Merges several rows: the last state, and what was done in them."""
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
    """One row of the river. A closed shard that is still read covers its children, which wait for it."""
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
            f"reading again after: {recovery.after}", _seconds(recovery.plain_seconds), _seconds(recovery.ours_seconds)
        )
    note = Text(
        "Handled again: finished, but not yet committed when its worker was killed.\nThe bound is one second of work. ",
        style="dim",
    )
    note.append(f"Seed {audit.seed}.")
    return Group(table, note)


def _program() -> str:
    """How to call the command line from here: by name, as a module, or from .venv/bin after `make demo`."""
    if shutil.which("anabranch"):
        return "anabranch"
    return "python -m anabranch" if sys.argv[0].endswith("__main__.py") else sys.argv[0]


def what_next() -> RenderableType:
    program = _program()
    width = max(len(f"{program} {command}") for command, _ in NEXT)
    text = Text("Try next (serve prints the variables for other terminals):", style="dim")
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


DRAIN_SECONDS_MIN = 3.0
DRAIN_SECONDS_MAX = 15.0
LOOK_EVERY_SECONDS = 0.5
LINE_EVERY_SECONDS = 2.0
PICTURE_WIDTH = 80


async def perform(*, seed: int, seconds: float, rate: int, picture: Path | None, on_stderr: bool) -> Audit:
    """Shows the run and the audit on standard output; with `on_stderr` only the run, on standard error."""
    logging.getLogger("anabranch").addHandler(logging.NullHandler())  # the view shows what happens
    console = Console(highlight=False, emoji=False, stderr=on_stderr)
    console.print(f"anabranch demo, seed {seed}: a local Kinesis, three workers, a plain loop")
    stage = Stage(seed=seed, records_per_second=rate)
    try:
        async with asyncio.TaskGroup() as group:
            await stage.open(group)
            console.print("waiting for the first records to come through both sides")
            await stage.await_readers()
            river = await _play(stage, console, seconds, group)
            stage.end()
    except BaseExceptionGroup as group_error:
        raise (single_cause(group_error) or group_error) from None
    finally:
        await stage.close()
    audit = _audit(stage, seed)
    if not on_stderr:
        console.print("", audit_table(audit), what_next(), sep="\n")
    if picture is not None:
        _draw(picture, river, audit)
    return audit


async def _play(stage: Stage, console: Console, seconds: float, group: asyncio.TaskGroup) -> River:
    loop = asyncio.get_running_loop()
    over = asyncio.Event()

    def on_key(key: str) -> None:
        if key in KEYS:
            stage.perform(KEYS[key])
            pressed.set()
        elif key == "q":
            over.set()

    pressed = asyncio.Event()
    writing = group.create_task(stage.write(seconds))
    with listen(loop.add_reader, on_key) as has_keys:
        if has_keys:
            over_watch = group.create_task(over.wait())
        story = group.create_task(_follow(stage, seconds, pressed))
        river = River(stage, keys=has_keys)
        show = _show_river if console.is_terminal else _show_lines
        viewing = group.create_task(show(stage, river, console))
        await asyncio.wait([writing, over_watch] if has_keys else [writing], return_when=asyncio.FIRST_COMPLETED)
        writing.cancel()
        await asyncio.wait([writing])
        story.cancel()
        await _drain(stage)
        viewing.cancel()
        await asyncio.wait([viewing])
        if has_keys:
            over_watch.cancel()
            loop.remove_reader(sys.stdin.fileno())
    return river


async def _follow(stage: Stage, seconds: float, pressed: asyncio.Event) -> None:
    """Follows the story until the user presses a key."""
    started = time.monotonic()
    for part, action in STORY:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(pressed.wait(), max(0.0, started + part * seconds - time.monotonic()))
            return
        stage.perform(action)


async def _drain(stage: Stage) -> None:
    """Gives both sides the same time to finish: until ours has, and at least a few seconds."""
    at_least, deadline = time.monotonic() + DRAIN_SECONDS_MIN, time.monotonic() + DRAIN_SECONDS_MAX
    while time.monotonic() < deadline and (  # noqa: ASYNC110 -- the count comes from other processes
        stage.handled_count < len(stage.put) or time.monotonic() < at_least
    ):
        await asyncio.sleep(0.1)


async def _show_river(stage: Stage, river: River, console: Console) -> None:
    with Live(river, console=console, refresh_per_second=8):
        while True:
            await stage.look()
            river.flow()
            await asyncio.sleep(LOOK_EVERY_SECONDS)


async def _show_lines(stage: Stage, river: River, console: Console) -> None:
    started, told = time.monotonic(), 0
    next_line = 0.0
    while True:
        await stage.look()
        river.flow()
        for happening in stage.happenings[told:]:
            console.print(f"        {happening.text}")
        told = len(stage.happenings)
        if time.monotonic() >= next_line:
            next_line = time.monotonic() + LINE_EVERY_SECONDS
            console.print(plain_line(stage, time.monotonic() - started), soft_wrap=True)
        await asyncio.sleep(LOOK_EVERY_SECONDS)


def _audit(stage: Stage, seed: int) -> Audit:
    recoveries = tuple(
        Recovery(
            happening.label,
            recovery_seconds(happening.at_ns, happening.shard_ids, stage.plain),
            recovery_seconds(happening.at_ns, happening.shard_ids, stage.ours, not_by=happening.victim),
        )
        for happening in stage.happenings
        if happening.shard_ids
    )
    return Audit(seed, judge(stage.put, stage.plain), judge(stage.put, stage.ours), recoveries)


def _draw(picture: Path, river: River, audit: Audit) -> None:
    paper = Console(file=io.StringIO(), record=True, width=PICTURE_WIDTH, force_terminal=True)
    paper.print(river.whole(), "", audit_table(audit), sep="\n")
    drawn = paper.export_svg(title="anabranch demo")
    picture.write_text(re.sub(r"@font-face \{.*?\n\s*\}\n", "", drawn, flags=re.DOTALL))  # no web fonts
