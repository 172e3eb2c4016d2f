"""One stream in virtual time: the public `Consumer` on the simulated loop, over the local server without its sockets.

The same names as in `stream_world`, so a test moves from sockets to virtual time by its import. Requests and answers
pass through the client's and the server's own codecs, and faults of the local server work. There are no threads here:
plain handlers are called on the loop, and heartbeats run there too.
"""

import asyncio
import functools
import inspect
import random
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from email.utils import formatdate
from typing import Any

from anabranch import Consumer
from anabranch._aws.account import ServiceAddress
from anabranch._aws.kinesis_client import KINESIS, KinesisClient
from anabranch._aws.service import AwsService
from anabranch._engine.handler_calls import HandlerCall
from anabranch._http.client.connection import ClientResponse, NoRoomError
from anabranch._http.client.dialer import parse_endpoint
from anabranch._http.server.exchange import Abandon, HangUp, Request, Response, StreamingResponse
from anabranch._ports import LeaseStore, Ports
from anabranch._wire.sigv4 import SigningCredentials
from anabranch.errors import TransportError
from anabranch.local.faults import Faults
from anabranch.local.http import EventStreams, KinesisHttpApp
from anabranch.local.service import LocalState
from anabranch.local.settings import LocalSettings
from anabranch.testing import loop as simulation

from stream_world import HALF, QUICK, StreamWorld, check_order, kinds, numbers

__all__ = [
    "HALF", "QUICK", "block", "check_order", "kinds", "now", "now_ms", "numbers", "run", "stream_world", "until",
]  # fmt: skip

_EPOCH_MS = 1_800_000_000_000
_LATENCY_SECONDS = 0.001
_ANSWER_TIMEOUT_SECONDS = 15.0
_OWN_BUFFER_BYTES = 64 << 10
_BYTES_PER_SECOND = 100 << 20


def now_ms() -> int:
    """The virtual wall clock, which the server uses, too."""
    return _EPOCH_MS + _CLOCK.now_ms()


def now() -> datetime:
    return datetime.fromtimestamp(now_ms() / 1000, UTC)


def block(seconds: float) -> None:
    """Blocks the loop: time passes, and no other task runs."""
    asyncio.get_running_loop()._now += seconds  # type: ignore[attr-defined]


class _LoopClock:
    def now_ms(self) -> int:
        return round(asyncio.get_running_loop().time() * 1000)

    def wall_ms(self) -> int:
        return now_ms()

    def is_before(self, at_ms: int, wall_ahead_ms_max: int) -> bool:
        now_ms = self.now_ms()
        return now_ms < at_ms and self.wall_ms() - now_ms <= wall_ahead_ms_max

    async def sleep_until_ms(self, at_ms: int) -> None:
        await asyncio.sleep(max(0, at_ms - self.now_ms()) / 1000)

    def call_at_ms(self, at_ms: int, callback: Callable[[], None]) -> asyncio.TimerHandle:
        return asyncio.get_running_loop().call_later(max(0, at_ms - self.now_ms()) / 1000, callback)


_CLOCK = _LoopClock()


class SimulatedKinesis:
    """The parts of `LocalKinesis` that need no sockets."""

    def __init__(self, create: dict[str, int], **options: Any) -> None:
        options["state_delay_ms"] = round(options.pop("state_delay", 0) * 1000)
        streams = EventStreams(now_ms)
        self.entropy = random.Random(0)
        self.settings = LocalSettings(**options)
        self.state = LocalState(self.settings, entropy=self.entropy, on_change=streams.wake)
        self.faults = Faults(self.entropy)
        self.handle = KinesisHttpApp(
            self.state, self.faults, streams, clock_ms=now_ms, journal=None, after_call=lambda: None
        )
        self.receiving_bytes = self.receiving_bytes_max = 0
        """The bodies that arrive at the same time at the clients."""
        for name, count in create.items():
            self.state.call("CreateStream", {"StreamName": name, "ShardCount": count}, now_ms=now_ms())

    def connect(self) -> KinesisClient:
        address = ServiceAddress(self.settings.region, parse_endpoint("http://simulated"))
        service = AwsService(KINESIS, address, _Credentials(), _Http(self), wall_ms=now_ms)  # type: ignore[arg-type]
        self.streams = _Streams(self)
        return KinesisClient(service, self.streams)  # type: ignore[arg-type]


class _Credentials:
    _given = SigningCredentials("local", "local")

    def current(self) -> SigningCredentials:
        return self._given

    async def get(self) -> SigningCredentials:
        return self._given


class _Http:
    """Replaces the client's connections."""

    def __init__(self, kinesis: SimulatedKinesis) -> None:
        self._kinesis = kinesis

    async def post(
        self,
        purpose: str,
        headers: bytes,
        pieces: Sequence[bytes],
        read: Callable[[ClientResponse], Any],
        *,
        repeatable: bool,
        has_room: Callable[[int], bool] | None = None,
    ) -> Any:
        lines = (line.partition(": ") for line in headers.decode("latin-1").split("\r\n") if line)
        request = Request("POST", "/", {name.lower(): value for name, _, value in lines}, b"".join(pieces), "1.1")
        await asyncio.sleep(_LATENCY_SECONDS)
        answer = self._kinesis.handle(request)
        if inspect.isawaitable(answer):
            answer = await answer
        if answer is Abandon.SILENCE:
            await asyncio.sleep(_ANSWER_TIMEOUT_SECONDS)
        if isinstance(answer, Abandon):
            raise TransportError(f"no answer: {answer.value}")
        await asyncio.sleep(_LATENCY_SECONDS)
        assert isinstance(answer, Response)
        found = {name.lower().encode("latin-1"): value.encode("latin-1") for name, value in answer.headers}
        found[b"date"] = formatdate(now_ms() / 1000, usegmt=True).encode("ascii")
        if len(answer.body) > _OWN_BUFFER_BYTES:
            if has_room is not None and not has_room(len(answer.body)):
                raise NoRoomError("no room")
            await self._transfer(len(answer.body))
        return read(ClientResponse(answer.status, found, memoryview(answer.body)))

    async def _transfer(self, body_bytes: int) -> None:
        kinesis = self._kinesis
        kinesis.receiving_bytes += body_bytes
        kinesis.receiving_bytes_max = max(kinesis.receiving_bytes_max, kinesis.receiving_bytes)
        try:
            await asyncio.sleep(body_bytes / _BYTES_PER_SECOND)
        finally:
            kinesis.receiving_bytes -= body_bytes

    async def close(self) -> None:
        """There is no connection to close."""


class _Streams:
    """Replaces the pool of streams: the bodies of subscriptions without a connection."""

    def __init__(self, kinesis: SimulatedKinesis) -> None:
        self._kinesis = kinesis
        self.opened: list[_Stream] = []

    async def open(self, headers: Any, body: bytes) -> Any:
        request = Request("POST", "/", {name.lower(): value for name, value in headers}, body, "1.1")
        await asyncio.sleep(_LATENCY_SECONDS)
        answer = self._kinesis.handle(request)
        if inspect.isawaitable(answer):
            answer = await answer
        if answer is Abandon.SILENCE:
            await asyncio.sleep(2 * _ANSWER_TIMEOUT_SECONDS)
        if isinstance(answer, Abandon):
            raise TransportError(f"no answer: {answer.value}")
        await asyncio.sleep(_LATENCY_SECONDS)
        found = {name.lower().encode("latin-1"): value.encode("latin-1") for name, value in answer.headers}
        found[b"date"] = formatdate(now_ms() / 1000, usegmt=True).encode("ascii")
        if isinstance(answer, Response):
            return ClientResponse(answer.status, found, memoryview(answer.body))
        assert isinstance(answer, StreamingResponse)
        stream = _Stream(found, answer.chunks)
        self.opened.append(stream)
        return stream

    @property
    def open_count(self) -> int:
        return sum(not stream.is_closed for stream in self.opened)

    async def close(self) -> None:
        for stream in self.opened:
            stream.close()


class _Stream:
    """A body with a window of 64 KiB: beyond that, the server sends only what the reader expects."""

    def __init__(self, headers: dict[bytes, bytes], chunks: Any) -> None:
        self.headers = headers
        self._chunks = chunks
        self._window = 64 << 10
        self._rest = b""
        self._waiting: asyncio.Future[bytes] | None = None
        self.is_closed = False

    async def receive(self) -> list[memoryview]:
        while True:
            if self.is_closed:
                raise TransportError("the stream was closed by this client")
            if self._rest:
                self._window = max(self._window, 64 << 10)
                piece, self._rest = self._rest[: self._window], self._rest[self._window :]
                self._window -= len(piece)
                return [memoryview(piece)]
            if self._waiting is None:
                self._waiting = asyncio.ensure_future(anext(self._chunks))
            try:
                self._rest = await asyncio.shield(self._waiting)
            except StopAsyncIteration:
                return []
            except HangUp:
                raise TransportError("the connection was reset") from None
            except asyncio.CancelledError:
                if self.is_closed:
                    raise TransportError("the stream was closed by this client") from None
                raise
            finally:
                if self._waiting is not None and self._waiting.done():
                    self._waiting = None

    def expect(self, wanted_bytes: int) -> None:
        self._window = max(self._window, wanted_bytes + (64 << 10))

    def progress(self) -> None:
        """There is no timer here."""

    def close(self, *, silent: bool = False) -> None:
        if not self.is_closed:
            self.is_closed = True
            if self._waiting is not None:
                self._waiting.cancel()
            else:
                asyncio.ensure_future(self._chunks.aclose())  # noqa: RUF006 -- it ends at once


class SimulatedConsumer(Consumer[Any]):
    """The public consumer, connected to a simulated Kinesis and clock."""

    def __init__(self, kinesis: SimulatedKinesis, stream: str | Sequence[str], **options: Any) -> None:
        super().__init__(stream, **options)
        self._kinesis = kinesis

    async def _connect(self, store: LeaseStore, resources: Any) -> Ports:
        await asyncio.sleep(_LATENCY_SECONDS)
        kinesis = self._kinesis
        return Ports(kinesis=kinesis.connect(), store=store, clock=_CLOCK, entropy=kinesis.entropy, emit=self._emit)

    async def run(self, handler: Any = None, **options: Any) -> Any:
        return await super().run(_on_the_loop(handler), **options)

    async def run_batches(self, handler: Any = None, **options: Any) -> Any:
        return await super().run_batches(_on_the_loop(handler), **options)


def _on_the_loop(handler: Any) -> Any:
    """A plain handler would run in a thread; here it is an async one."""
    if handler is None or HandlerCall(handler, threads=1).is_async:
        return handler

    @functools.wraps(handler, updated=())
    async def call(*arguments: Any) -> Any:
        return handler(*arguments)

    return call


class SimulatedWorld(StreamWorld):
    kinesis: SimulatedKinesis  # type: ignore[assignment]

    def call(self, operation: str, **request: Any) -> dict[str, Any]:
        return self.kinesis.state.call(operation, {"StreamName": self.stream, **request}, now_ms=now_ms())

    def consumer(self, stream: str | Sequence[str] | None = None, **options: Any) -> SimulatedConsumer:
        return SimulatedConsumer(self.kinesis, stream or self.stream, **{"settings": QUICK, **options})


@asynccontextmanager
async def stream_world(shards: int = 1, **options: Any) -> AsyncIterator[SimulatedWorld]:
    yield SimulatedWorld(SimulatedKinesis({"orders": shards}, **options), "orders")  # type: ignore[arg-type]


def run(main: Callable[[], Coroutine[Any, Any, None]], seconds: float = 600) -> None:
    async def limited() -> None:
        async with asyncio.timeout(seconds):
            await main()

    simulation.run(limited)


async def until(condition: Callable[[], bool], what: str, seconds: float = 60) -> None:
    """Awaits a condition of another task; names it if it does not come."""
    deadline = asyncio.get_running_loop().time() + seconds
    while not condition():
        if asyncio.get_running_loop().time() > deadline:
            raise TimeoutError(f"waited {seconds:.0f} virtual seconds for: {what}")
        await asyncio.sleep(0.005)


def polled_shards(consumer):
    """How the reader of this consumer polls its shards."""
    return list(consumer._consumer_run._reader._shards.values())
