"""Progress on standard error while a command waits: a bar on a terminal, otherwise a line when something changes."""

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

from anabranch._cli.connection import Connection
from anabranch._cli.output import CommandFailed, counted, make_console, say
from anabranch._model.streams import StreamName
from anabranch.errors import StreamNotFoundError

if TYPE_CHECKING:
    from rich.console import Console

    from anabranch._wire.messages import StreamSummary


Report = Callable[[float, str], None]
"""Called with the fraction done (0 to 1) and the current step."""


@contextmanager
def progress(title: str) -> Iterator[Report]:
    console = make_console(stderr=True)
    try:
        if console.is_terminal:
            with _bar(title, console) as report:
                yield report
        else:
            yield _LineReport(title)
    except KeyboardInterrupt:
        say(f"{title}: stopped waiting; the service continues")
        raise


@contextmanager
def _bar(title: str, console: "Console") -> Iterator[Report]:
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}", markup=False), BarColumn(bar_width=30), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as bars:
        task = bars.add_task(title, total=1.0)
        yield lambda done, text: bars.update(task, completed=done, description=f"{title}: {text}")


class _LineReport:
    def __init__(self, title: str) -> None:
        self._title = title
        self._said: str | None = None

    def __call__(self, done: float, text: str) -> None:  # noqa: ARG002 -- a line has no bar
        if text != self._said:
            self._said = text
            say(f"{self._title}: {text}")


WAIT_SECONDS_MAX: Final = 3_600
"""For one change. AWS takes about 30 s for a few shards, longer for more."""

_FIRST_PAUSE: Final = 0.1
_PAUSE_MAX: Final = 2.0  # DescribeStreamSummary is limited to 20 calls per second and account

Done = Callable[["StreamSummary | None"], bool]


async def wait_until_active(connection: Connection, stream: StreamName, report: Report) -> "StreamSummary":
    def show(summary: "StreamSummary | None") -> bool:
        report(0.0, "not there yet" if summary is None else summary.status)
        return summary is not None and summary.status == "ACTIVE"

    summary = await _wait(connection, stream, show)
    assert summary is not None
    return summary


async def wait_until_gone(connection: Connection, stream: StreamName, report: Report) -> None:
    def show(summary: "StreamSummary | None") -> bool:
        report(0.0, "gone" if summary is None else summary.status)
        return summary is None

    await _wait(connection, stream, show)


async def wait_until_shards(
    connection: Connection, stream: StreamName, report: Report, *, before: int, after: int
) -> "StreamSummary":
    """Waits for ACTIVE with that many open shards, or ACTIVE again: others may change the stream too."""
    was_updating = False

    def show(summary: "StreamSummary | None") -> bool:
        nonlocal was_updating
        if summary is None:
            raise CommandFailed(f"{stream.name} was deleted meanwhile")
        was_updating = was_updating or summary.status != "ACTIVE"
        done = 1.0 if before == after else (summary.open_shard_count - before) / (after - before)
        report(min(1.0, max(0.0, done)), f"{summary.status}, {counted(summary.open_shard_count, 'open shard')}")
        return summary.status == "ACTIVE" and (was_updating or summary.open_shard_count == after)

    summary = await _wait(connection, stream, show)
    assert summary is not None
    return summary


async def _wait(connection: Connection, stream: StreamName, is_done: Done) -> "StreamSummary | None":
    deadline = time.monotonic() + WAIT_SECONDS_MAX
    pause = _FIRST_PAUSE
    while True:
        try:
            summary: StreamSummary | None = await connection.present_summary(stream)
        except StreamNotFoundError:
            summary = None
        if is_done(summary):
            return summary
        if time.monotonic() >= deadline:
            raise CommandFailed(
                f"{stream.name} is not ready after {WAIT_SECONDS_MAX} s; the service continues, "
                f"`anabranch streams describe {stream.name}` shows its status"
            )
        await asyncio.sleep(pause)
        pause = min(_PAUSE_MAX, pause * 1.5)
