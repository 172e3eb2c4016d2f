"""Test doubles: a record without a stream, a clock that a test moves by hand, and a local Kinesis in a thread."""

import asyncio
import heapq
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from anabranch._model.streams import BEFORE_FIRST_SUB
from anabranch._ports import Clock
from anabranch.records import Context, Record

if TYPE_CHECKING:
    from anabranch.local import LocalKinesis

_SEQUENCE_NUMBER = "49590338271490256608559692538361571095921575989136588898"


def make_record(
    data: bytes = b"",
    partition_key: str = "key",
    *,
    value: Any = None,
    stream: str = "stream",
    shard_id: str = "shardId-000000000000",
    sequence_number: str = _SEQUENCE_NUMBER,
    sub_sequence_number: int = BEFORE_FIRST_SUB,
    arrival_seconds: float = 1_700_000_000.0,
) -> Record[Any]:
    """A record as a handler gets it. `value` is what `decode=` would return; without it, the data."""
    return Record(
        stream=stream,
        shard_id=shard_id,
        sequence_number=sequence_number,
        sub_sequence_number=sub_sequence_number,
        partition_key=partition_key,
        arrival_seconds=arrival_seconds,
        data=data,
        value=data if value is None else value,
    )


def make_context(
    *,
    attempt: int = 1,
    fence_token: int = 1,
    millis_behind_latest: int | None = 0,
    deadline: float | None = None,
) -> Context:
    """The second argument of a handler, as in its first call for a record."""
    return Context(
        attempt=attempt, fence_token=fence_token, millis_behind_latest=millis_behind_latest, deadline=deadline
    )


class _ManualTimer:
    def __init__(self, callback: Callable[[], None]) -> None:
        self.callback: Callable[[], None] | None = callback

    def cancel(self) -> None:
        self.callback = None


class TimerClock(Clock):
    """A clock of the engine, with the two times and the timers of a subclass."""

    def is_before(self, at_ms: int, wall_ahead_ms_max: int) -> bool:
        now_ms = self.now_ms()
        return now_ms < at_ms and self.wall_ms() - now_ms <= wall_ahead_ms_max

    async def sleep_until_ms(self, at_ms: int) -> None:
        if at_ms <= self.now_ms():
            await asyncio.sleep(0)
            return
        woken = asyncio.get_running_loop().create_future()
        timer = self.call_at_ms(at_ms, lambda: None if woken.done() else woken.set_result(None))
        try:
            await woken
        finally:
            timer.cancel()


class ManualClock(TimerClock):
    """What sleeps on this clock wakes when `advance` reaches its time, and not before.

    It starts at `now_ms`. The wall clock is `wall_ahead_ms` ahead, until `jump_wall` changes that.
    """

    def __init__(self, now_ms: int = 0, *, wall_ahead_ms: int = 1_700_000_000_000) -> None:
        self._now_ms = now_ms
        self._wall_ahead_ms = wall_ahead_ms
        self._timers: list[tuple[int, int, _ManualTimer]] = []
        self._made = 0

    def now_ms(self) -> int:
        return self._now_ms

    def wall_ms(self) -> int:
        return self._now_ms + self._wall_ahead_ms

    def call_at_ms(self, at_ms: int, callback: Callable[[], None]) -> _ManualTimer:
        """Calls back in the `advance` that reaches `at_ms`, or in the next one if it has passed already."""
        timer = _ManualTimer(callback)
        self._made += 1
        heapq.heappush(self._timers, (at_ms, self._made, timer))
        return timer

    def advance(self, by_ms: int) -> None:
        """Advances the time and calls back every timer that comes due, each at its own time."""
        end_ms = self._now_ms + by_ms
        while self._timers and self._timers[0][0] <= end_ms:
            at_ms, _, timer = heapq.heappop(self._timers)
            self._now_ms = max(self._now_ms, at_ms)
            if timer.callback is not None:
                timer.callback()
        self._now_ms = end_ms

    def jump_wall(self, by_ms: int) -> None:
        """Moves only the wall clock, as NTP does."""
        self._wall_ahead_ms += by_ms


@contextmanager
def run_local_kinesis(**options: Any) -> "Iterator[LocalKinesis]":
    """Runs a local Kinesis in its own thread, for tests that are not async. Takes the options of `LocalKinesis`."""
    from anabranch.local import LocalKinesis  # noqa: PLC0415 -- a test that needs only a record loads no server

    started: Future[tuple[LocalKinesis, asyncio.AbstractEventLoop, asyncio.Event]] = Future()

    async def main() -> None:
        stop = asyncio.Event()
        try:
            async with LocalKinesis(**options) as kinesis:
                started.set_result((kinesis, asyncio.get_running_loop(), stop))
                await stop.wait()
        except Exception as error:
            if started.done():
                raise
            started.set_exception(error)

    thread = threading.Thread(target=lambda: asyncio.run(main()), name="local-kinesis", daemon=True)
    thread.start()
    kinesis, loop, stop = started.result()
    try:
        yield kinesis
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join()
