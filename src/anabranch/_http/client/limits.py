"""Sizes, counts and timeouts that bound what a server can cost a client.

They protect the process from broken or hostile responses: nothing is allocated, kept or awaited beyond them. The
defaults are above anything that the service does.
"""

import asyncio
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientTimeouts:
    connect: float = 5.0
    """For name, TCP, proxy and TLS together."""
    read: float = 15.0
    """The longest silence inside an answer."""
    message: float = 30.0
    """The longest wait for something whole inside a stream; a subscription says something every five seconds."""
    total: float = 30.0
    """From the call to the last byte of its answer, waiting for a free connection included."""
    idle: float = 20.0
    """How long an unused connection is kept: less than servers and the balancers before them usually do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientLimits:
    head_bytes_max: int = 64 << 10
    """Status line and headers together."""
    body_bytes_max: int = 64 << 20
    """GetRecords returns up to 10 MiB of data: 14 MiB as base64, and up to 10,000 partition keys beside it."""
    interim_answers_max: int = 8
    """Answers of the 1xx kind before the real one."""
    kept_buffer_bytes_max: int = 32 << 20
    """Large receive buffers that a client keeps for its next large answers."""


class ReadTimeout:
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

    def expired(self, now: float) -> str | None:
        """What has been missing for too long; None while there is read_timeout left."""
        if self._waiter is None:
            return None
        waiting = now - self._since
        if waiting >= self._silence:
            return f"has been silent for {self._silence:g} s inside a stream"
        if self._waited + waiting >= self._whole:
            return f"has sent no whole message for {self._whole:g} s inside a stream"
        return None
