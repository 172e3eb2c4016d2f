"""A command's connections: to Kinesis (the data-plane client and the control calls), and to an application.

Each is opened once and always closed. Commands are blocking programs: `run` runs a coroutine and returns its result.
Between two calls Python handles Ctrl-C, so a prompt can be interrupted. Reads are retried; calls that change something
are sent once.
"""

import argparse
import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, Final, TypeVar

from anabranch._cli.options import aws_from
from anabranch._cli.output import CommandFailed
from anabranch._core.backoff import backoff_ms
from anabranch._model.entropy import Entropy
from anabranch._model.streams import Shard, ShardFilter, StreamName
from anabranch._ports import Clock
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
_FIRST_DELAY_MS: Final = 100
_DELAY_MS_MAX: Final = 10_000
_RETRY_AFTER_MS_MAX: Final = 60_000


async def retry(attempt: Callable[[], Awaitable[T]], clock: Clock, entropy: Entropy) -> T:
    """Returns the first success or raises the last failure. Errors that a retry cannot fix are raised at once.

    The delay is at least the service's Retry-After, of up to a minute.
    """
    failures = 0
    while True:
        try:
            return await attempt()
        except (ThrottledError, UnavailableError, TransportError) as error:
            failures += 1
            if failures >= _ATTEMPTS_MAX:
                raise
            delay_ms = backoff_ms(failures, entropy, first_ms=_FIRST_DELAY_MS, max_ms=_DELAY_MS_MAX)
            if isinstance(error, ServiceError) and error.retry_after_seconds is not None:
                delay_ms = max(delay_ms, min(round(error.retry_after_seconds * 1000), _RETRY_AFTER_MS_MAX))
        await clock.sleep_until_ms(clock.now_ms() + delay_ms)


_NAMES_SHOWN_MAX: Final = 10


@contextmanager
def connect(arguments: argparse.Namespace, stream: StreamName | None = None) -> Iterator["Connection"]:
    """Uses the AWS options. The region of a stream's ARN overrides theirs."""
    from anabranch._aws.account import AwsAccount
    from anabranch._aws.control import KinesisControl
    from anabranch._aws.kinesis_client import open_kinesis

    account = AwsAccount(aws_from(arguments))
    region = None if stream is None else stream.region
    with asyncio.Runner() as runner:
        try:
            client = runner.run(open_kinesis(account, region=region))
            control = KinesisControl(account, region=region)
            try:
                yield Connection(runner, account, client, control, region)
            finally:
                control.close()
                runner.run(client.close())
        finally:
            account.close()


def ask_application(arguments: argparse.Namespace, question: "Callable[[Application], Coroutine[Any, Any, T]]") -> T:
    """Opens the application that the arguments name, and returns what `question` returns."""
    from anabranch.application import Application

    async def ask() -> T:
        async with Application(arguments.app, leases=arguments.leases) as application:
            return await question(application)

    return asyncio.run(ask())


class Connection:
    def __init__(
        self,
        runner: asyncio.Runner,
        account: "AwsAccount",
        client: "KinesisClient",
        control: "KinesisControl",
        region: str | None,
    ) -> None:
        from anabranch._engine.clock import SystemClock

        self.client = client
        self.control = control
        self._runner = runner
        self._account = account
        self._region = region
        self._clock = SystemClock()
        self._entropy = random.Random()  # noqa: S311 -- jitter, not a secret

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return self._runner.run(work)

    async def _retry(self, attempt: Callable[[], Awaitable[T]]) -> T:
        return await retry(attempt, self._clock, self._entropy)

    async def summary(self, stream: StreamName) -> "StreamSummary":
        """If the stream does not exist, CommandFailed names the streams that do."""
        try:
            return await self.find_summary(stream)
        except StreamNotFoundError as error:
            raise CommandFailed(await self._missing_stream_text(stream)) from error

    async def find_summary(self, stream: StreamName) -> "StreamSummary":
        """Like `summary`, but raises StreamNotFoundError, for callers that expect it."""
        return await self._retry(lambda: self.client.describe_stream_summary(stream))

    async def shards(self, stream: StreamName, shard_filter: ShardFilter | None = None) -> list[Shard]:
        """All pages of one listing."""
        pages = self._pages(lambda token: self.client.list_shards(stream, shard_filter=shard_filter, next_token=token))
        return [shard async for page in pages for shard in page.shards]

    async def consumers(self, stream_arn: str) -> list["ConsumerDescription"]:
        pages = self._pages(lambda token: self.client.list_stream_consumers(stream_arn, next_token=token))
        return [consumer async for page in pages for consumer in page.consumers]

    async def _pages(self, fetch: Callable[[str | None], Awaitable[P]]) -> AsyncIterator[P]:
        page = await self._retry(lambda: fetch(None))
        yield page
        while (token := page.next_token) is not None:
            page = await self._retry(lambda: fetch(token))
            yield page

    async def _missing_stream_text(self, stream: StreamName) -> str:
        address = await self._account.address("kinesis", region=self._region)
        where = f" in {address.region}" if stream.arn is None else ""
        if not address.endpoint.host.endswith((".amazonaws.com", ".amazonaws.com.cn")):
            where += f" at {address.endpoint.url}"
        missing = f"stream {str(stream)!r} does not exist{where}"
        try:
            streams = {listed.name: listed for listed in await self.control.list_streams()}
        except AnabranchError:
            return f"{missing}; check the region and the AWS account"
        if (same_name := streams.get(stream.name)) is not None:
            return f"{missing}; the stream with that name here is {same_name.arn or stream.name}"
        names = list(streams)
        if not names:
            return f"{missing}; there are no streams. Create it: `anabranch streams create {stream.name} --shards 1`"
        similar = get_close_matches(stream.name, names, n=1)
        existing = f"did you mean {similar[0]!r}? Existing streams" if similar else "existing streams"
        more = f" and {len(names) - _NAMES_SHOWN_MAX} more" if len(names) > _NAMES_SHOWN_MAX else ""
        return f"{missing}; {existing}: {', '.join(names[:_NAMES_SHOWN_MAX])}{more}"
