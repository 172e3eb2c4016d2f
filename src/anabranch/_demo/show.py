"""What the demo shows: a river on a terminal, plain lines elsewhere, and the audit at the end.

In the river, time flows down and the width is the hash space. Each colour is a worker; grey is a shard that nobody
reads at that moment. The margin says what was done to the stream.
"""

import asyncio
import logging
import shutil
import sys
import time
from collections import deque
from collections.abc import Sequence
from itertools import groupby
from typing import Final

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from anabranch._demo.audit import (
    FIGURES,
    HEADINGS,
    MUST_BE_ZERO,
    Audit,
    Recovery,
    audit_lines,
    judge,
    recovery_seconds,
)
from anabranch._demo.keyboard import listen
from anabranch._demo.picture import draw
from anabranch._demo.stage import KEYS, STORY, DemoEvent, RiverRow, ShardView, Stage
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


class River:
    def __init__(self, stage: Stage, *, keys: bool) -> None:
        self._stage = stage
        self._keys = keys
        self.rows: list[RiverRow] = []
        self._shown_count = 0
        self._started = time.monotonic()
        self._counts: deque[tuple[float, int]] = deque(maxlen=20)

    async def flow(self) -> list[DemoEvent]:
        """Adds a row: who reads which part of the hash space now. Returns the events since the previous row."""
        await self._stage.look()
        news = self._stage.events[self._shown_count :]
        self._shown_count += len(news)
        marks = tuple(event.mark for event in news)
        self.rows.append(RiverRow(time.monotonic() - self._started, tuple(self._stage.shards), marks))
        return news

    def plain_line(self) -> str:
        put, handled = len(self._stage.put), self._stage.handled_count
        owners = " ".join(f"{shard.shard_id[-2:]}:{shard.owner or '-'}" for shard in self._stage.shards)
        seconds = self.rows[-1].seconds
        return f"{seconds:5.1f} s  put {put:6}  handled {handled:6}  waiting {put - handled:4}  {owners}"

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        height = max(ROWS_MIN, min(ROWS_MAX, console.height - LINES_AROUND))
        rows = [_line(row) for row in self.rows[-height:]]
        yield Panel(
            Group(*rows, *[Text("")] * (height - len(rows))),
            title="the stream: hash space across, time downwards, a colour for each worker",
            title_align="left",
            border_style="dim",
            width=TIME + WIDTH + MARGIN + 5,
        )
        yield self._figures()
        yield self._news()

    def _figures(self) -> RenderableType:
        stage, now = self._stage, time.monotonic()
        put, handled = len(stage.put), stage.handled_count
        self._counts.append((now, handled))
        since, before = self._counts[0]
        rate = (handled - before) / (now - since) if now > since else 0.0
        line = Text()
        for name, colour in COLOURS.items():
            owned = sum(shard.owner == name for shard in stage.shards)
            line.append(f" ██ worker {name}: {owned} {'shard ' if owned == 1 else 'shards'} ", style=colour)
        line.append(f"\n put {put:6}   handled {handled:6}   waiting {put - handled:4}   {rate:6.0f} records/s")
        return line

    def _news(self) -> RenderableType:
        lines = Text()
        for event in self._stage.events[-NEWS:]:
            lines.append(f" {event.text}\n", style="bold" if event.killed_worker else "")
        if self._keys:
            lines.append(" keys: s split   m merge   k kill a worker   t throttle   q end", style="dim")
        return lines


def _line(row: RiverRow) -> Text:
    line = Text().append(f"{row.seconds:5.1f} s ", style="dim").append_text(_hash_space(row.shards))
    return line.append(f" {', '.join(row.marks)}"[: MARGIN + 1], style="bold")


def _hash_space(shards: Sequence[ShardView]) -> Text:
    """One row of the river. A closed shard that is still being read hides its children, which must wait for it."""
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


def audit_table(audit: Audit) -> RenderableType:
    headings, *lines = audit_lines(audit)
    table = Table(title="What became of every record", title_justify="left", title_style="bold")
    for number, heading in enumerate(headings):
        table.add_column(heading, justify="right" if number else "left")
    for number, (name, *cells) in enumerate(lines, start=1):
        styles = ["" if name not in MUST_BE_ZERO else "green" if cell == "0" else "bold red" for cell in cells]
        styled = (Text(cell, style=style) for cell, style in zip(cells, styles, strict=True))
        table.add_row(name, *styled, end_section=number == len(FIGURES))
    notes = [
        "Handled again: finished, but not yet committed at the kill.",
        "The careful loop is one process. It reads parents before their children.",
        f"To repeat this story: {_program()} demo --seed {audit.seed}",
    ]
    if "async-kinesis" in audit.peers:
        notes.insert(1, "async-kinesis lists shards once a minute, so it may not have read new ones yet.")
    return Group(table, Text("\n".join(notes), style="dim"))


def _program() -> str:
    """How to call the command line: by name, as a module, or by its path after `make demo`."""
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


DRAIN_SECONDS_MIN: Final = 3.0
DRAIN_SECONDS_MAX: Final = 15.0
LOOK_EVERY_SECONDS: Final = 0.5
LINE_EVERY_SECONDS: Final = 2.0


async def perform(
    *, seed: int, seconds: float, rate: int, fanout: bool, console: Console, shows_audit: bool
) -> tuple[Audit, str]:
    """Shows the run on the console. Returns the audit and the final view, an SVG document."""
    logging.getLogger("anabranch").addHandler(logging.NullHandler())  # the view shows what happens
    how = " by fan-out" if fanout else ""
    console.print(f"anabranch demo, seed {seed}: three workers read a local Kinesis{how}.")
    group = asyncio.TaskGroup()
    stage = Stage(group, seed=seed, seconds=seconds, records_per_second=rate, fanout=fanout)
    try:
        async with group:
            await stage.open()
            alternatives = ", ".join(HEADINGS.get(name, name) for name in stage.peers)
            console.print(f"Beside them: {alternatives}. Starting all of them...")
            await stage.await_readers()
            river = await _play(stage, console, seconds, group)
            stage.end()
    except BaseExceptionGroup as group_error:
        raise (single_cause(group_error) or group_error) from None
    finally:
        await stage.close()
    audit = _audit(stage, seed)
    if shows_audit:
        console.print("", audit_table(audit), what_next(), sep="\n")
    return audit, draw(river.rows, audit)


async def _play(stage: Stage, console: Console, seconds: float, group: asyncio.TaskGroup) -> River:
    writing, story = group.create_task(stage.write()), group.create_task(_follow(stage, seconds))

    def on_key(key: str) -> None:
        if key in KEYS:
            story.cancel()
            stage.perform(KEYS[key])
        elif key == "q" and not writing.cancelling():  # a second cancel would interrupt the end of the producer
            writing.cancel()

    with listen(on_key) as has_keys:
        river = River(stage, keys=has_keys)
        show = _show_river if console.is_terminal else _show_lines
        viewing = group.create_task(show(river, console))
        await asyncio.wait([writing])
        story.cancel()
        await _drain(stage)
        viewing.cancel()
        await asyncio.wait([viewing])
    return river


async def _follow(stage: Stage, seconds: float) -> None:
    """Performs the story. It is cancelled as soon as the user presses a key."""
    started = time.monotonic()
    for part, action in STORY:
        await asyncio.sleep(started + part * seconds - time.monotonic())
        stage.perform(action)


async def _drain(stage: Stage) -> None:
    """Waits for our workers to finish, and at least a few seconds, in which the alternatives can finish, too."""
    not_before, deadline = time.monotonic() + DRAIN_SECONDS_MIN, time.monotonic() + DRAIN_SECONDS_MAX
    while time.monotonic() < deadline and (  # noqa: ASYNC110 -- the count comes from other processes
        stage.handled_count < len(stage.put) or time.monotonic() < not_before
    ):
        await asyncio.sleep(0.1)


async def _show_river(river: River, console: Console) -> None:
    with Live(river, console=console, refresh_per_second=8):
        while True:
            await river.flow()
            await asyncio.sleep(LOOK_EVERY_SECONDS)


async def _show_lines(river: River, console: Console) -> None:
    next_line = 0.0
    while True:
        for event in await river.flow():
            console.print(f"        {event.text}")
        if time.monotonic() >= next_line:
            next_line = time.monotonic() + LINE_EVERY_SECONDS
            console.print(river.plain_line(), soft_wrap=True)
        await asyncio.sleep(LOOK_EVERY_SECONDS)


def _audit(stage: Stage, seed: int) -> Audit:
    now_ns = time.monotonic_ns()
    written = {record.shard_id for record in stage.put.values()}
    sides = {**stage.peers, "anabranch": stage.ours}
    recoveries = []
    for event in stage.events:
        if written.intersection(event.shard_ids):
            seconds = {
                name: recovery_seconds(event.at_ns, event.shard_ids, stage.put, handled, not_by=event.killed_worker)
                for name, handled in sides.items()
            }
            recoveries.append(Recovery(event.label, (now_ns - event.at_ns) / 1e9, seconds))
    verdicts = {name: judge(stage.put, handled) for name, handled in sides.items()}
    return Audit(seed, verdicts.pop("anabranch"), verdicts, tuple(recoveries))
