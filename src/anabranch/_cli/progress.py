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
        say(f"{title}: stopped waiting; Kinesis continues the change")
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
        self._last_text: str | None = None

    def __call__(self, done: float, text: str) -> None:  # noqa: ARG002 -- only the bar shows it
        if text != self._last_text:
            self._last_text = text
            say(f"{self._title}: {text}")


WAIT_SECONDS_MAX: Final = 3_600
"""How long we wait for one change. AWS takes about 30 s for a few shards, longer for more."""

_FIRST_POLL_SECONDS: Final = 0.1
_POLL_SECONDS_MAX: Final = 2.0  # DescribeStreamSummary is limited to 20 calls per second and account

IsDone = Callable[["StreamSummary | None"], bool]
"""Shows the progress, and returns True to stop waiting. None: the stream does not exist."""


async def wait_until_active(connection: Connection, stream: StreamName, report: Report) -> "StreamSummary":
    def is_done(summary: "StreamSummary | None") -> bool:
        report(0.0, "not created yet" if summary is None else summary.status)
        return summary is not None and summary.status == "ACTIVE"

    summary = await _wait(connection, stream, is_done)
    assert summary is not None
    return summary


async def wait_until_deleted(connection: Connection, stream: StreamName, report: Report) -> None:
    def is_done(summary: "StreamSummary | None") -> bool:
        report(0.0, "deleted" if summary is None else summary.status)
        return summary is None

    await _wait(connection, stream, is_done)


async def wait_until_resharded(
    connection: Connection, stream: StreamName, report: Report, *, before: int, after: int
) -> "StreamSummary":
    """Waits until the stream is ACTIVE with `after` open shards, or ACTIVE again after an update: others may change the
    shard count too.
    """
    was_updating = False

    def is_done(summary: "StreamSummary | None") -> bool:
        nonlocal was_updating
        if summary is None:
            raise CommandFailed(f"{stream.name} was deleted in the meantime")
        was_updating = was_updating or summary.status != "ACTIVE"
        done = 1.0 if before == after else (summary.open_shard_count - before) / (after - before)
        report(min(1.0, max(0.0, done)), f"{summary.status}, {counted(summary.open_shard_count, 'open shard')}")
        return summary.status == "ACTIVE" and (was_updating or summary.open_shard_count == after)

    summary = await _wait(connection, stream, is_done)
    assert summary is not None
    return summary


async def _wait(connection: Connection, stream: StreamName, is_done: IsDone) -> "StreamSummary | None":
    deadline = time.monotonic() + WAIT_SECONDS_MAX
    poll_seconds = _FIRST_POLL_SECONDS
    while True:
        try:
            summary: StreamSummary | None = await connection.find_summary(stream)
        except StreamNotFoundError:
            summary = None
        if is_done(summary):
            return summary
        if time.monotonic() >= deadline:
            raise CommandFailed(
                f"{stream.name} is not ready after {WAIT_SECONDS_MAX} s; Kinesis continues the change, "
                f"`anabranch streams describe {stream.name}` shows its status"
            )
        await asyncio.sleep(poll_seconds)
        poll_seconds = min(_POLL_SECONDS_MAX, poll_seconds * 1.5)
