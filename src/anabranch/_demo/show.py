"""One performance of the demo: the story, the view, the audit."""

import asyncio
import contextlib
import io
import logging
import re
import sys
import time
from pathlib import Path

from rich.console import Console
from rich.live import Live

from anabranch._demo.audit import Audit, Recovery, judge, recovery_seconds
from anabranch._demo.keyboard import listen
from anabranch._demo.stage import Stage
from anabranch._demo.story import KEYS, STORY
from anabranch._demo.views import River, audit_table, plain_line, what_next
from anabranch._engine.host import single_cause

__all__ = ["perform"]

DRAIN_SECONDS_MIN = 3.0
DRAIN_SECONDS_MAX = 15.0
LOOK_EVERY_SECONDS = 0.5
LINE_EVERY_SECONDS = 2.0
PICTURE_WIDTH = 80


async def perform(*, seed: int, seconds: float, rate: int, picture: Path | None, on_stderr: bool) -> Audit:
    """Shown on standard output, the audit at its end; or without that on standard error, where the caller prints it."""
    logging.getLogger("anabranch").addHandler(logging.NullHandler())  # the view tells what happens
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
    """The story, unless somebody presses keys: then the rest is theirs."""
    started = time.monotonic()
    for part, action in STORY:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(pressed.wait(), max(0.0, started + part * seconds - time.monotonic()))
            return
        stage.perform(action)


async def _drain(stage: Stage) -> None:
    """Both sides get the same time to finish: until ours has, and long enough for the other to catch up."""
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
    picture.write_text(re.sub(r"@font-face \{.*?\n\s*\}\n", "", drawn, flags=re.DOTALL))  # no fonts from elsewhere
