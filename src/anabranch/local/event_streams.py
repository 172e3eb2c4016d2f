"""SubscribeToShard as bytes: frames as records arrive, heartbeats, and the end, for as long as the client stays.

What to send and when is decided by the pure subscription; here is the waiting. A subscriber sleeps until its shard
changes (`wake`) or its own deadline comes; one that does not read is not polled, so nothing piles up for it.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable
from typing import Final

from anabranch._http.server.exchange import HangUp
from anabranch._wire.event_stream import encode_headers, frame
from anabranch.local.bodies import BodyCodec
from anabranch.local.faults import CallPlan
from anabranch.local.state.subscription import Subscription

__all__ = ["CONTENT_TYPE", "EventStreams"]

CONTENT_TYPE: Final = "application/vnd.amazon.eventstream"


class EventStreams:
    def __init__(self, clock_ms: Callable[[], int]) -> None:
        self._clock_ms = clock_ms
        self._waiting: dict[tuple[str, str], dict[asyncio.Event, None]] = {}

    def wake(self, stream_name: str, shard_id: str) -> None:
        """The shard has new records, was closed or deleted, or another subscription has taken over."""
        for event in self._waiting.get((stream_name, shard_id), ()):
            event.set()

    async def chunks(self, subscription: Subscription, codec: BodyCodec, plan: CallPlan) -> AsyncGenerator[bytes, None]:
        changed = asyncio.Event()
        key = (subscription.stream_name, subscription.shard_id)
        self._waiting.setdefault(key, {})[changed] = None
        event_headers = _event_headers(codec)
        sent = 0
        try:
            yield _initial_response(codec)
            while not subscription.is_over:
                if plan.events is not None and sent >= plan.events:
                    await _go_wrong(plan)
                changed.clear()
                event = subscription.poll(self._clock_ms())
                if event is None:
                    await self._sleep(changed, subscription.next_deadline_ms)
                else:
                    sent += 1
                    headers = _exception_headers(codec, event.type) if event.is_exception else event_headers
                    yield frame(headers, codec.encode(event.members))
        finally:
            subscription.close()
            waiting = self._waiting[key]
            del waiting[changed]
            if not waiting:
                del self._waiting[key]

    async def _sleep(self, changed: asyncio.Event, deadline_ms: int) -> None:
        try:
            async with asyncio.timeout(max(0, deadline_ms - self._clock_ms()) / 1000):
                await changed.wait()
        except TimeoutError:
            pass


async def _go_wrong(plan: CallPlan) -> None:
    if plan.loss_after == "hang_up":
        raise HangUp
    await asyncio.Event().wait()  # silence: until the client has had enough


def _initial_response(codec: BodyCodec) -> bytes:
    headers = {":event-type": "initial-response", ":content-type": codec.content_type, ":message-type": "event"}
    return frame(encode_headers(headers), codec.encode({}))


def _event_headers(codec: BodyCodec) -> bytes:
    return encode_headers(
        {":event-type": "SubscribeToShardEvent", ":content-type": codec.content_type, ":message-type": "event"}
    )


def _exception_headers(codec: BodyCodec, code: str) -> bytes:
    return encode_headers({":exception-type": code, ":content-type": codec.content_type, ":message-type": "exception"})
