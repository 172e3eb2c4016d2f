"""A command's connection to Kinesis: the data-plane client and the control calls, opened once and always closed.

Commands are blocking programs: `run` runs a coroutine and returns its result. Between two calls Python handles Ctrl-C,
so a prompt can be interrupted. Reads are retried; calls that change something are sent once.
"""

import argparse
import asyncio
import random
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
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
    from anabranch._wire.messages import ConsumerDescription, StreamSummary


T = TypeVar("T")

_RETRY_AFTER_MS_MAX: Final = 60_000


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryPolicy:
    attempts_max: int = 5
    first_delay_ms: int = 100
    delay_ms_max: int = 10_000

    def delay_ms(self, failures: int, entropy: Entropy, retry_after_seconds: float | None = None) -> int:
        """The delay after `failures` failures. It is at least the service's Retry-After, of up to a minute."""
        jittered = backoff_ms(failures, entropy, first_ms=self.first_delay_ms, max_ms=self.delay_ms_max)
        if retry_after_seconds is None:
            return jittered
        return max(jittered, min(round(retry_after_seconds * 1000), _RETRY_AFTER_MS_MAX))


class RetryBudget:
    """A token bucket: a retry costs several tokens, a success earns one."""

    def __init__(self, tokens_max: int = 500, *, retry_cost: int = 5, transport_cost: int = 10) -> None:
        self._tokens_max = tokens_max
        self._tokens = tokens_max
        self._retry_cost = retry_cost
        self._transport_cost = transport_cost

    @property
    def tokens(self) -> int:
        return self._tokens

    def spend(self, error: Exception) -> bool:
        """False if the budget does not allow another attempt. A transport error costs more than an error response."""
        cost = self._transport_cost if isinstance(error, TransportError) else self._retry_cost
        if cost > self._tokens:
            return False
        self._tokens -= cost
        return True

    def earn(self) -> None:
        self._tokens = min(self._tokens_max, self._tokens + 1)


class Retries:
    def __init__(
        self, clock: Clock, entropy: Entropy, *, policy: RetryPolicy | None = None, budget: RetryBudget | None = None
    ) -> None:
        self._clock = clock
        self._entropy = entropy
        self._policy = policy or RetryPolicy()
        self._budget = budget or RetryBudget()

    async def call(self, attempt: Callable[[], Awaitable[T]]) -> T:
        """Returns the first success or raises the last failure. Errors that a retry cannot fix are raised at once."""
        failures = 0
        while True:
            try:
                result = await attempt()
            except (ThrottledError, UnavailableError, TransportError) as error:
                failures += 1
                if failures >= self._policy.attempts_max or not self._budget.spend(error):
                    raise
                retry_after_seconds = error.retry_after_seconds if isinstance(error, ServiceError) else None
                delay_ms = self._policy.delay_ms(failures, self._entropy, retry_after_seconds)
            else:
                self._budget.earn()
                return result
            await self._clock.sleep_until_ms(self._clock.now_ms() + delay_ms)


_ATTEMPTS_MAX: Final = 3
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


class Connection:
    def __init__(
        self,
        runner: asyncio.Runner,
        account: "AwsAccount",
        client: "KinesisClient",
        control: "KinesisControl",
        region: str | None,
    ) -> None:
        from anabranch._cli.connection import Retries, RetryPolicy
        from anabranch._engine.clock import SystemClock

        self.client = client
        self.control = control
        self._runner = runner
        self._account = account
        self._region = region
        policy = RetryPolicy(attempts_max=_ATTEMPTS_MAX)
        self._retries = Retries(SystemClock(), random.Random(), policy=policy)  # noqa: S311 -- jitter, not a secret

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return self._runner.run(work)

    async def summary(self, stream: StreamName) -> "StreamSummary":
        """If the stream does not exist, CommandFailed names the streams that do."""
        try:
            return await self.find_summary(stream)
        except StreamNotFoundError as error:
            raise CommandFailed(await self._missing_stream_text(stream)) from error

    async def find_summary(self, stream: StreamName) -> "StreamSummary":
        """Like `summary`, but raises StreamNotFoundError, for callers that expect it."""
        return await self._retries.call(lambda: self.client.describe_stream_summary(stream))

    async def shards(self, stream: StreamName, shard_filter: ShardFilter | None = None) -> list[Shard]:
        """All pages of one listing."""
        found: list[Shard] = []
        token: str | None = None
        while True:
            page = await self._retries.call(
                lambda: self.client.list_shards(stream, shard_filter=shard_filter, next_token=token)  # noqa: B023 -- used at once
            )
            found += page.shards
            token = page.next_token
            if token is None:
                return found

    async def consumers(self, stream_arn: str) -> list["ConsumerDescription"]:
        found: list[ConsumerDescription] = []
        token: str | None = None
        while True:
            page = await self._retries.call(
                lambda: self.client.list_stream_consumers(stream_arn, next_token=token)  # noqa: B023 -- used at once
            )
            found += page.consumers
            token = page.next_token
            if token is None:
                return found

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
