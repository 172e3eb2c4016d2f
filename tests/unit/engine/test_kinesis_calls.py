"""Calls that must succeed: asked again while that may help, and no longer."""

import asyncio
import random
from typing import NamedTuple

import pytest

from anabranch._engine.ports import Ports
from anabranch._engine.shard_discovery import RETRY_FOR_MS, await_stream, list_all_shards, retry_kinesis_call
from anabranch._model.streams import StreamName
from anabranch._wire.messages import ListShardsResponse
from anabranch.errors import AccessDeniedError, AnabranchError, ThrottledError, TransportError
from anabranch.testing.clock import ManualClock


class HurryingClock(ManualClock):
    """Whose sleeps pass at once."""

    async def sleep_until_ms(self, at_ms):
        self.advance(max(0, at_ms - self.now_ms()))


def outside_with(clock, kinesis=None):
    return Ports(kinesis=kinesis, store=None, clock=clock, entropy=random.Random(1), emit=None)


def asked_for_ms(error, **patience):
    """For how long a service is asked that always fails like this."""

    async def main():
        clock = HurryingClock()
        ports = outside_with(clock)

        async def call():
            raise error

        with pytest.raises(type(error)) as caught:
            await retry_kinesis_call(ports, call, **patience)
        assert caught.value is error
        return clock.now_ms()

    return asyncio.run(main())


STREAM = StreamName("orders")
THROTTLED = ThrottledError("slow down", operation="DescribeStreamSummary", code="LimitExceededException")
UNREACHABLE = TransportError("no route")


@pytest.mark.parametrize("error", [THROTTLED, UNREACHABLE])
def test_what_may_pass_is_waited_for(error):
    assert 0 < asked_for_ms(error) <= RETRY_FOR_MS


def test_a_service_that_throttles_is_asked_for_as_long_as_the_start_may_take():
    assert 110_000 < asked_for_ms(THROTTLED, retry_answered_ms=120_000) <= 120_000


def test_an_endpoint_that_nobody_reaches_is_named_soon_all_the_same():
    assert asked_for_ms(UNREACHABLE, retry_answered_ms=120_000) <= RETRY_FOR_MS


@pytest.mark.parametrize(
    "error", [AccessDeniedError("no", operation="ListShards", code="AccessDeniedException"), AnabranchError("odd")]
)
def test_what_is_wrong_for_good_is_said_at_once(error):
    assert asked_for_ms(error, retry_answered_ms=120_000) == 0


class Active(NamedTuple):
    status: str = "ACTIVE"


class ThrottledForAMinute:
    def __init__(self, clock):
        self._clock = clock

    async def list_shards(self, stream, **options):
        return self._answer(ListShardsResponse((), None))

    async def describe_stream_summary(self, stream):
        return self._answer(Active())

    def _answer(self, answer):
        if self._clock.now_ms() < 60_000:
            raise THROTTLED
        return answer


def test_a_start_outlasts_a_minute_of_throttling_and_what_runs_asks_again_later():
    async def main():
        clock = HurryingClock()
        ports = outside_with(clock, ThrottledForAMinute(clock))
        with pytest.raises(ThrottledError):
            await list_all_shards(ports, STREAM, None)
        assert await list_all_shards(ports, STREAM, None, retry_answered_ms=120_000) == []
        assert clock.now_ms() >= 60_000

    asyncio.run(main())


@pytest.mark.parametrize("timeout_ms, outcome", [(120_000, Active()), (0, None)])
def test_a_stream_is_waited_for_as_long_as_the_start_may_take(timeout_ms, outcome):
    async def main():
        clock = HurryingClock()
        try:
            return await await_stream(outside_with(clock, ThrottledForAMinute(clock)), STREAM, timeout_ms)
        except ThrottledError:
            return None

    assert asyncio.run(main()) == outcome
