"""Reads state from any thread on the event loop that owns it, and keeps one client for each loop."""

import asyncio
import contextlib
import threading
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import Future
from typing import Final, Generic, NamedTuple, Protocol, TypeVar

T = TypeVar("T")

READ_WAIT_SECONDS: Final = 1.0
"""The default timeout of a Kubernetes probe: a loop that is busy for longer is not ready."""


def running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


def read_on(loop: asyncio.AbstractEventLoop, read: Callable[[], T]) -> T:
    """Calls `read` on the loop. Raises TimeoutError if that is busy for a second, and RuntimeError if it is closed."""
    if running_loop() is loop:
        return read()
    reading: Future[T] = Future()

    def perform() -> None:
        if not reading.set_running_or_notify_cancel():
            return
        try:
            reading.set_result(read())
        except Exception as error:  # noqa: BLE001 -- raised in the calling thread
            reading.set_exception(error)

    loop.call_soon_threadsafe(perform)
    try:
        return reading.result(READ_WAIT_SECONDS)
    except TimeoutError:
        reading.cancel()
        raise TimeoutError(f"the event loop did not answer within {READ_WAIT_SECONDS:g} s") from None


class Client(Protocol):
    async def close(self) -> None: ...


C = TypeVar("C", bound=Client)


class _LoopClient(NamedTuple, Generic[C]):
    lifetime: AsyncGenerator[C, None]
    client: C


class PerLoop(ABC, Generic[C]):
    """One client for each event loop, because a connection belongs to one loop, and a lease store is called from two
    (rule R0). Each client lives in an async generator: a loop that ends closes its generators, so the client, too.
    """

    def __init__(self) -> None:
        self._clients: dict[asyncio.AbstractEventLoop, _LoopClient[C]] = {}
        self._opening: dict[asyncio.AbstractEventLoop, asyncio.Lock] = {}
        self._closing: set[asyncio.Task[None]] = set()
        self._guard = threading.Lock()

    @abstractmethod
    async def open_client(self) -> C:
        """Opens a client for the running loop."""

    async def get(self) -> C:
        loop = asyncio.get_running_loop()
        if (found := self._clients.get(loop)) is not None:
            return found.client
        with self._guard:
            opening = self._opening.setdefault(loop, asyncio.Lock())
        async with opening:
            if (found := self._clients.get(loop)) is None:
                lifetime = self._live()
                found = _LoopClient(lifetime, await anext(lifetime))
                with self._guard:
                    ended = [other for other in self._opening if other.is_closed()]
                    for other in ended:
                        self._opening.pop(other, None)
                        self._clients.pop(other, None)
                    self._clients[loop] = found
        return found.client

    async def _live(self) -> AsyncGenerator[C, None]:
        client = await self.open_client()
        try:
            yield client
        finally:
            await client.close()

    async def close(self) -> None:
        here = asyncio.get_running_loop()
        with self._guard:
            clients, self._clients = self._clients, {}
            self._opening.clear()
        for loop, one in clients.items():
            if loop is here:
                await one.lifetime.aclose()
            else:
                with contextlib.suppress(RuntimeError):  # that loop has ended, and closed its client itself
                    loop.call_soon_threadsafe(self._close_there, loop, one)

    def _close_there(self, loop: asyncio.AbstractEventLoop, one: _LoopClient[C]) -> None:
        """Runs in the other loop. If that loop ends first, it closes the client itself."""
        closing = loop.create_task(_aclose(one.lifetime), name="close a client")
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)


async def _aclose(lifetime: AsyncGenerator[C, None]) -> None:
    await lifetime.aclose()
