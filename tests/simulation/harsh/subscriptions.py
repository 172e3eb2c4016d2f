"""Subscriptions in a simulation: the local server's event streams, on their way through a network that breaks them.

Bytes arrive in order, as over TCP, but late; streams break inside a frame, fall silent, or end with an error of the
service. The client's own decoder reads them, and its windows limit what the server may send.
"""

import asyncio
import contextvars
from collections.abc import AsyncGenerator, Callable
from email.utils import formatdate
from random import Random
from typing import Final

from anabranch._http.client.limits import WINDOW_BYTES
from anabranch._wire.event_stream import encode_message
from anabranch.errors import TransportError
from anabranch.local.bodies import JSON
from anabranch.local.faults import NO_FAULT
from anabranch.local.http import EventStreams
from anabranch.local.state.subscription import Subscription
from anabranch.testing.loop import SimulationLoop
from anabranch.testing.world.processes import MESSAGE_SECONDS_MAX, Network, SimulatedProcess
from harsh.options import HarshOptions

_STREAM_ERRORS: Final = ("KMSThrottlingException", "InternalFailureException", "KMSAccessDeniedException")


class SimulatedStreams:
    """The streams of all subscriptions. One instance per fleet."""

    def __init__(self, loop: SimulationLoop, clock_ms: Callable[[], int], random: Random) -> None:
        self._loop = loop
        self._clock_ms = clock_ms
        self._random = random
        self._events = EventStreams(clock_ms)

    def wake(self, stream_name: str, shard_id: str) -> None:
        self._events.wake(stream_name, shard_id)

    def open(
        self, subscription: Subscription, process: SimulatedProcess, network: Network, options: HarshOptions
    ) -> "SimulatedBody":
        """The service accepted the subscription: sends its events until the client closes it or it ends."""
        body = SimulatedBody(self._loop, self._random, formatdate(self._clock_ms() / 1000, usegmt=True))
        chunks = self._events.chunks(subscription, JSON, NO_FAULT)
        wire = _Wire(self._loop, self._random, process, network, options, body)
        # Outside of any process: the service goes on when the client is paused or dead.
        body.sender = self._loop.create_task(wire.send_all(chunks), name="subscription", context=contextvars.Context())
        return body


class SimulatedBody:
    """The client's end: what has arrived, and how much more the server may send."""

    def __init__(self, loop: SimulationLoop, random: Random, date: str) -> None:
        self.headers = {b"date": date.encode("ascii")}
        self.sender: asyncio.Task[None] | None = None
        self.window_bytes = WINDOW_BYTES
        self.room = asyncio.Event()
        """Set when the reader has made room."""
        self.is_closed = False
        self._loop = loop
        self._random = random
        self._arrived: list[memoryview] = []
        self._waiter: asyncio.Future[None] | None = None
        self._error: TransportError | None = None
        self._is_over = False

    async def receive(self) -> list[memoryview]:
        while not self._arrived:
            if self._is_over:
                return []
            if self._error is not None:
                raise self._error
            if self.window_bytes < WINDOW_BYTES:
                self._open_window(WINDOW_BYTES)
            self._waiter = self._loop.create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        pieces, self._arrived = self._arrived, []
        return pieces

    def expect(self, wanted_bytes: int) -> None:
        if self.window_bytes < wanted_bytes:
            self._open_window(wanted_bytes + WINDOW_BYTES)

    def _open_window(self, to_bytes: int) -> None:
        self.window_bytes = to_bytes
        self.room.set()

    def progress(self) -> None:
        """The reader's own watch is enough here."""

    def close(self, *, silent: bool = False) -> None:
        if self.is_closed:
            return
        self.is_closed = True
        self.fail(TransportError("the stream was closed by this client"))
        if self.sender is not None:
            delay = self._random.uniform(0.001, MESSAGE_SECONDS_MAX)
            self._loop.call_later(delay, self.sender.cancel, context=contextvars.Context())

    # called by the wire

    def arrive(self, piece: bytes) -> None:
        self.window_bytes -= len(piece)
        self._arrived.append(memoryview(piece))
        self._wake()

    def end(self) -> None:
        self._is_over = True
        self._wake()

    def fail(self, error: TransportError) -> None:
        if self._error is None and not self._is_over:
            self._error = error
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class _Wire:
    """Carries the chunks of one subscription, and breaks it as the seed decides."""

    def __init__(
        self,
        loop: SimulationLoop,
        random: Random,
        process: SimulatedProcess,
        network: Network,
        options: HarshOptions,
        body: SimulatedBody,
    ) -> None:
        self._loop = loop
        self._random = random
        self._process = process
        self._network = network
        self._options = options
        self._body = body
        lifetime = random.uniform(2, 40) if options.expired and not network.is_calm else float("inf")
        self._ends_at = loop.time() + lifetime

    async def send_all(self, chunks: AsyncGenerator[bytes, None]) -> None:
        try:
            async for chunk in chunks:
                await self._travel()
                fault = self._draw_fault()
                if fault == "silent":
                    await asyncio.Event().wait()
                if fault == "broken":
                    self._body.arrive(chunk[: self._random.randrange(len(chunk))])
                    self._body.fail(TransportError("the connection was reset"))
                    return
                if fault == "error":
                    await self._send(_error_message(self._random.choice(_STREAM_ERRORS)))
                    break
                await self._send(chunk)
                if self._loop.time() >= self._ends_at:
                    break
            self._body.end()
        finally:
            await chunks.aclose()

    def _draw_fault(self) -> str | None:
        if self._network.is_calm or not self._options.broken_streams:
            return None
        dice = self._random.random() / self._options.broken_streams
        return next(
            (fault for fault, share in (("silent", 0.3), ("error", 0.6), ("broken", 1.0)) if dice < share), None
        )

    async def _travel(self) -> None:
        """Waits as long as the bytes take. A cut holds them up, and half of the cuts are never noticed by TCP."""
        options, random = self._options, self._random
        is_late = not self._network.is_calm and random.random() < options.late + options.lost
        await asyncio.sleep(random.uniform(1.5, 14) if is_late else random.uniform(0.001, MESSAGE_SECONDS_MAX))
        cut_until = self._process.cut_until.get("stream", 0.0)
        if self._loop.time() < cut_until:
            if random.random() < 0.5:
                await asyncio.Event().wait()
            await asyncio.sleep(cut_until - self._loop.time())
        if not self._process.is_alive:
            raise asyncio.CancelledError  # its operating system closes the connection

    async def _send(self, chunk: bytes) -> None:
        """As the client's window allows."""
        while chunk:
            while self._body.window_bytes <= 0:
                self._body.room.clear()
                await self._body.room.wait()
            piece, chunk = chunk[: self._body.window_bytes], chunk[self._body.window_bytes :]
            self._body.arrive(piece)


def _error_message(code: str) -> bytes:
    headers = {":exception-type": code, ":content-type": "application/json", ":message-type": "exception"}
    return encode_message(headers, b'{"message": "a simulated fault"}')
