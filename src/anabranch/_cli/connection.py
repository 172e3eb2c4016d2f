"""Connections to Kinesis (the client and the control calls) and to an application, and waits for changes of a stream.

Commands are blocking programs: `Connection.run` runs one coroutine and returns its result. Between two calls Python
handles Ctrl-C, so a prompt can be interrupted. Reads are retried; calls that change something are sent once.
"""

import argparse
import asyncio
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from difflib import get_close_matches
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Literal, TypeVar

from anabranch._cli.options import aws_from
from anabranch._cli.output import CommandFailed, Report, counted, listed
from anabranch._core.backoff import backoff_ms
from anabranch._model.streams import Shard, ShardFilter, StreamName
from anabranch.errors import (
    AnabranchError,
    ServiceError,
    StreamNotFoundError,
    ThrottledError,
    TransportError,
    UnavailableError,
)

if TYPE_CHECKING:
    from anabranch._aws.account import AwsAccount
    from anabranch._aws.control import KinesisControl
    from anabranch._aws.kinesis_client import KinesisClient
    from anabranch._wire.messages import (
        ConsumerDescription,
        ListShardsResponse,
        ListStreamConsumersResponse,
        StreamSummary,
    )
    from anabranch.application import Application

T = TypeVar("T")
P = TypeVar("P", "ListShardsResponse", "ListStreamConsumersResponse")

_ATTEMPTS_MAX: Final = 3
_RETRY_AFTER_MS_MAX: Final = 60_000
_JITTER: Final = random.Random()  # noqa: S311 -- not a secret


async def retry(attempt: Callable[[], Awaitable[T]]) -> T:
    """Returns the first success or raises the last failure. Errors that a retry cannot fix are raised at once.

    A Retry-After of the service is respected, up to a minute.
    """
    failures = 0
    while True:
        try:
            return await attempt()
        except (ThrottledError, UnavailableError, TransportError) as error:
            failures += 1
            if failures >= _ATTEMPTS_MAX:
                raise
            delay_ms = backoff_ms(failures, _JITTER, first_ms=100, max_ms=1_000)
            if isinstance(error, ServiceError) and error.retry_after_seconds is not None:
                delay_ms = max(delay_ms, min(round(error.retry_after_seconds * 1000), _RETRY_AFTER_MS_MAX))
        await asyncio.sleep(delay_ms / 1000)


@contextmanager
def connect(arguments: argparse.Namespace, stream: StreamName | None = None) -> Iterator["Connection"]:
    """Connects with the AWS options. The region of a stream's ARN overrides `--region`."""
    from anabranch._aws.account import AwsAccount
    from anabranch._aws.control import KinesisControl
    from anabranch._aws.kinesis_client import open_kinesis

    region = None if stream is None else stream.region
    with asyncio.Runner() as runner, closing(AwsAccount(aws_from(arguments))) as account:
        client = runner.run(open_kinesis(account, region=region))
        with closing(KinesisControl(account, region=region)) as control:
            try:
                yield Connection(client, control, runner, account, region)
            finally:
                runner.run(client.close())


def ask_application(arguments: argparse.Namespace, question: "Callable[[Application], Coroutine[Any, Any, T]]") -> T:
    """Opens the application that the arguments name, and returns what `question` returns."""
    from anabranch.application import Application

    async def ask() -> T:
        async with Application(arguments.app, leases=arguments.leases) as application:
            return await question(application)

    return asyncio.run(ask())


@dataclass(frozen=True)
class Connection:
    client: "KinesisClient"
    control: "KinesisControl"
    _runner: asyncio.Runner
    _account: "AwsAccount"
    _region: str | None

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return self._runner.run(work)

    async def summary(self, stream: StreamName) -> "StreamSummary":
        """If the stream does not exist, CommandFailed names the streams that do."""
        try:
            return await retry(lambda: self.client.describe_stream_summary(stream))
        except StreamNotFoundError as error:
            raise CommandFailed(await self._missing_stream_text(stream)) from error

    async def shards(self, stream: StreamName, shard_filter: ShardFilter | None = None) -> list[Shard]:
        """All pages of one listing."""
        pages = _pages(lambda token: self.client.list_shards(stream, shard_filter=shard_filter, next_token=token))
        return [shard async for page in pages for shard in page.shards]

    async def consumers(self, stream_arn: str) -> list["ConsumerDescription"]:
        pages = _pages(lambda token: self.client.list_stream_consumers(stream_arn, next_token=token))
        return [consumer async for page in pages for consumer in page.consumers]

    async def _missing_stream_text(self, stream: StreamName) -> str:
        address = await self._account.address("kinesis", region=self._region)
        where = f" in {address.region}" if stream.arn is None else ""
        if not address.endpoint.host.endswith((".amazonaws.com", ".amazonaws.com.cn")):
            where += f" at {address.endpoint.url}"
        missing = f"stream {str(stream)!r} does not exist{where}"
        try:
            streams = {found.name: found for found in await self.control.list_streams()}
        except AnabranchError:
            return f"{missing}; check the region and the AWS account"
        if (same_name := streams.get(stream.name)) is not None:
            return f"{missing}; the stream with that name here is {same_name.arn or stream.name}"
        if not streams:
            return f"{missing}; there are no streams. Create it: `anabranch streams create {stream.name} --shards 1`"
        similar = get_close_matches(stream.name, streams, n=1)
        existing = f"did you mean {similar[0]!r}? Existing streams" if similar else "existing streams"
        return f"{missing}; {existing}: {listed(list(streams))}"


async def _pages(fetch: Callable[[str | None], Awaitable[P]]) -> AsyncIterator[P]:
    token = None
    while True:
        page = await retry(partial(fetch, token))
        yield page
        token = page.next_token
        if token is None:
            return


WAIT_SECONDS_MAX: Final = 3_600
"""How long we wait for one change. AWS takes about 30 s for a few shards, longer for more."""

_FIRST_POLL_SECONDS: Final = 0.1
_POLL_SECONDS_MAX: Final = 2.0  # DescribeStreamSummary is limited to 20 calls per second and account


async def wait_until_active(connection: Connection, stream: StreamName, report: Report) -> "StreamSummary":
    def check(summary: "StreamSummary | None") -> "StreamSummary | None":
        report(0.0, "not created yet" if summary is None else summary.status)
        return summary if summary is not None and summary.status == "ACTIVE" else None

    return await _wait(connection, stream, check)


async def wait_until_deleted(connection: Connection, stream: StreamName, report: Report) -> None:
    def check(summary: "StreamSummary | None") -> Literal[True] | None:
        report(0.0, "deleted" if summary is None else summary.status)
        return True if summary is None else None

    await _wait(connection, stream, check)


async def wait_until_resharded(
    connection: Connection, stream: StreamName, report: Report, *, before: int, after: int
) -> "StreamSummary":
    """Waits until the stream is ACTIVE with `after` open shards, or ACTIVE again after an update with another result:
    others may change the shard count too.
    """
    was_updating = False

    def check(summary: "StreamSummary | None") -> "StreamSummary | None":
        nonlocal was_updating
        if summary is None:
            raise CommandFailed(f"{stream.name} was deleted meanwhile")
        was_updating = was_updating or summary.status != "ACTIVE"
        done = 1.0 if before == after else (summary.open_shard_count - before) / (after - before)
        report(min(1.0, max(0.0, done)), f"{summary.status}, {counted(summary.open_shard_count, 'open shard')}")
        is_done = summary.status == "ACTIVE" and (was_updating or summary.open_shard_count == after)
        return summary if is_done else None

    return await _wait(connection, stream, check)


async def _wait(connection: Connection, stream: StreamName, check: "Callable[[StreamSummary | None], T | None]") -> T:
    """`check` gets the stream, or None if it does not exist. It shows the progress, and ends the wait with a result."""
    deadline = time.monotonic() + WAIT_SECONDS_MAX
    poll_seconds = _FIRST_POLL_SECONDS
    while True:
        try:
            summary: StreamSummary | None = await retry(lambda: connection.client.describe_stream_summary(stream))
        except StreamNotFoundError:
            summary = None
        if (result := check(summary)) is not None:
            return result
        if time.monotonic() >= deadline:
            raise CommandFailed(
                f"{stream.name} is not ready after {WAIT_SECONDS_MAX} s; Kinesis continues the change, "
                f"`anabranch streams describe {stream.name}` shows its status"
            )
        await asyncio.sleep(poll_seconds)
        poll_seconds = min(_POLL_SECONDS_MAX, poll_seconds * 1.5)
