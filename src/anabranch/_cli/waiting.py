"""Waiting for a stream to become what it was asked to be: polled, bounded, and shown.

The service makes changes in its own time. Giving up, or Ctrl-C, ends only the waiting: the change goes on.
"""

import asyncio
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from anabranch._cli.connection import Connection
from anabranch._cli.outcomes import CommandFailed
from anabranch._cli.output import counted
from anabranch._cli.progress import Report
from anabranch._model.streams import StreamName
from anabranch.errors import StreamNotFoundError

if TYPE_CHECKING:
    from anabranch._wire.messages import StreamSummary

__all__ = ["WAIT_SECONDS_MAX", "wait_until_active", "wait_until_gone", "wait_until_shards"]

WAIT_SECONDS_MAX: Final = 3_600
"""For one change. AWS takes half a minute for a few shards, and longer the more there are."""

_FIRST_PAUSE: Final = 0.1
_PAUSE_MAX: Final = 2.0  # DescribeStreamSummary is limited to 20 calls a second for the whole account

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
    """ACTIVE with that many open shards, or ACTIVE again: someone else may be changing the stream too."""
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
                f"{stream.name} is not ready after {WAIT_SECONDS_MAX} s; the service goes on, "
                f"`anabranch streams describe {stream.name}` shows its status"
            )
        await asyncio.sleep(pause)
        pause = min(_PAUSE_MAX, pause * 1.5)
