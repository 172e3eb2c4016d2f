"""How long the reader of a stream waits: for any byte, and for something whole.

A server that says nothing and one that drips a byte now and then, with no message ever complete, both end. Only time
spent waiting counts: a reader that is busy elsewhere holds itself up, not the server. There is no timer: whoever owns
the stream asks now and then.
"""

import asyncio

from anabranch._http.client_limits import ClientTimeouts

__all__ = ["Patience"]


class Patience:
    def __init__(self, loop: asyncio.AbstractEventLoop, timeouts: ClientTimeouts) -> None:
        self._loop = loop
        self._silence = timeouts.read
        self._whole = timeouts.message
        self._waiter: asyncio.Future[None] | None = None
        self._since = 0.0
        self._waited = 0.0

    async def wait(self) -> None:
        """Until `wake`."""
        self._waiter = self._loop.create_future()
        self._since = self._loop.time()
        try:
            await self._waiter
        finally:
            self._waiter = None
            self._waited += self._loop.time() - self._since

    def wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def progress(self) -> None:
        """Something whole has come."""
        self._waited = 0.0

    def spent(self, now: float) -> str | None:
        """What has been missing for too long; None while there is patience left."""
        if self._waiter is None:
            return None
        waiting = now - self._since
        if waiting >= self._silence:
            return f"has been silent for {self._silence:g} s inside a stream"
        if self._waited + waiting >= self._whole:
            return f"has sent no whole message for {self._whole:g} s inside a stream"
        return None
