"""The handle that a put returns: a record on its way, awaitable for how it ended.

There may be millions of them, so a handle is the record itself and shares all state with the others of its bundle;
a future exists only while somebody awaits. Awaiting never changes the outcome: a cancelled await leaves the record
on its way.
"""

import asyncio
from collections.abc import Callable, Generator
from typing import Any

from anabranch._core.writing.aggregation import Bundle, OutgoingRecord
from anabranch.records import PutResult

__all__ = ["Delivery"]


class Delivery(OutgoingRecord, gc=False, eq=False):
    """A record given to the producer. `await delivery` returns its `PutResult`: delivered, or not and why."""

    def __await__(self) -> Generator[Any, None, PutResult]:
        while not self.bundle.is_settled:
            future = asyncio.get_running_loop().create_future()
            if self.when_moved(lambda future=future: _wake(future)):  # type: ignore[misc]
                yield from future
        return self.result()

    def __repr__(self) -> str:
        if not self.bundle.is_settled:
            state = "on its way"
        else:
            state = "delivered" if self.bundle.sequence_number is not None else "failed"
        return f"<Delivery to {self.bundle.stream}, partition key {self.partition_key!r}: {state}>"

    def done(self) -> bool:
        return self.bundle.is_settled

    def result(self) -> PutResult:
        """How it ended. Looking at a failure acknowledges it."""
        if not self.bundle.is_settled:
            raise asyncio.InvalidStateError("this record is still on its way: await it")
        result = self.put_result
        if not result.delivered:
            self.bundle.failures.see(self)
        return result

    def when_moved(self, callback: Callable[[], None]) -> bool:
        """Calls back once when its bundle is settled, or its records went on in another. False: that has happened."""
        bundle: Bundle = self.bundle
        if bundle.waiters is None:
            bundle.waiters = []
        bundle.waiters.append((self, callback))
        # Looked at after the callback is in place: another thread may be settling the bundle right now.
        return not (bundle.is_settled or bundle is not self.bundle)


def _wake(future: asyncio.Future[None]) -> None:
    loop = future.get_loop()
    if loop is _running_loop():
        _resolve(future)
    elif not loop.is_closed():
        loop.call_soon_threadsafe(_resolve, future)


def _running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


def _resolve(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
