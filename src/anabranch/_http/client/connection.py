"""One HTTP/1.1 connection of a client: one request at a time, with its response read into reused memory.

`asyncio.BufferedProtocol` lets TLS decrypt straight into our buffer. The body is handed out as a view of that buffer,
valid until the connection is released. Request pieces are written one by one while the transport has room.

    IDLE ── exchange ──> HEAD ──> BODY | UNMEASURED ──> HELD ── release ──> IDLE
    every phase ── abort, a lost connection, a bad response, a body without room, a deadline ──> CLOSED

There is no timer here: the owner of the connection calls `check` periodically. Cancelling a call aborts the connection,
because the rest of its response may still be on the way.
"""

import asyncio
import enum
import select
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, cast

from anabranch._http.client.limits import (
    BODY_BYTES_MAX,
    HEAD_BYTES_MAX,
    INTERIM_ANSWERS_MAX,
    ClientTimeouts,
)
from anabranch._http.client.response_framing import CHUNKED, ResponseChunks, ResponseHead, parse_response_head
from anabranch.errors import TransportError

_FIRST_ALLOCATION_BYTES_MAX: Final = 4 << 20  # an announced length above this is trusted only as bytes arrive


class ReceiveBuffers:
    """Memory for large responses, lent to a connection for one response.

    Allocating a megabyte per response would cost more in page faults than all other work on it, and a megabyte per
    connection would mostly be unused. So each connection owns a small buffer and borrows a large one from here.
    """

    def __init__(self, kept_bytes_max: int) -> None:
        self._kept_bytes_max = kept_bytes_max
        self._kept: list[bytearray] = []

    def borrow(self, size: int) -> bytearray:
        """At least `size` bytes, with arbitrary content."""
        kept = self._kept
        for index in range(len(kept) - 1, -1, -1):
            if len(kept[index]) >= size:
                return kept.pop(index)
        # Rounded up by an eighth, so that slightly growing responses do not each need a new buffer.
        return bytearray(size + (size >> 3))

    def give_back(self, buffer: bytearray) -> None:
        self._kept.append(buffer)
        while sum(map(len, self._kept)) > self._kept_bytes_max:
            del self._kept[0]


class NoRoomError(TransportError):
    """The caller had no room for the body of a response."""


class Phase(enum.Enum):
    IDLE = "idle"
    HEAD = "head"
    BODY = "body"
    UNMEASURED = "unmeasured"
    """The body has no content-length: it is chunked, or ends with the connection."""
    HELD = "held"
    CLOSED = "closed"


IDLE, HEAD, BODY, UNMEASURED, HELD, CLOSED = Phase  # plain names, because each call uses them many times


@dataclass(slots=True)
class ClientResponse:
    """A complete response. `body` is valid until its connection is released."""

    status: int
    headers: dict[bytes, bytes]
    body: memoryview


HasRoom = Callable[[int], bool]
"""Whether there is room for a body of this many bytes. Called before a body is received that is larger than the
connection's own buffer; if the length is unknown, each time that the body grows.
"""


class ClientConnection(asyncio.BufferedProtocol):
    def __init__(
        self, loop: asyncio.AbstractEventLoop, peer: str, timeouts: ClientTimeouts, buffers: ReceiveBuffers
    ) -> None:
        self._loop = loop
        self._peer = peer
        self._timeouts = timeouts
        self._buffers = buffers
        self._transport: asyncio.Transport = cast("asyncio.Transport", None)  # set by connection_made, before any use
        self._own = self._buffer = bytearray(HEAD_BYTES_MAX)
        self._own_view = self._view = memoryview(self._own)
        self._end = 0  # bytes of the buffer that are filled
        self._body_start = 0
        self._body_end = 0
        self._phase = IDLE
        self._head: ResponseHead | None = None
        self._chunks: ResponseChunks | None = None
        self._collected = bytearray()
        self._answer: asyncio.Future[ClientResponse] | None = None
        self._has_room: HasRoom | None = None
        self._drained: asyncio.Future[None] | None = None
        self._sending = False
        self._interim_answers = 0
        self._deadline = 0.0
        self._heard_at = 0.0
        self._closed: asyncio.Future[None] = loop.create_future()
        self.exchanges = 0
        self.idle_since = loop.time()
        self.dropped_before_answer = False
        """The server closed a kept connection instead of answering: most likely it closed it while we wrote."""

    # Called by the owner

    @property
    def usable(self) -> bool:
        return self._phase is IDLE and not self._transport.is_closing()

    def has_input(self) -> bool:
        """Asks the kernel whether the server has sent bytes or closed this connection: the event loop may not know."""
        poll = select.poll()
        poll.register(self._transport.get_extra_info("socket").fileno(), select.POLLIN)
        return bool(poll.poll(0))

    async def exchange(
        self, head: bytes, pieces: Sequence[bytes], deadline: float, *, has_room: HasRoom | None = None
    ) -> ClientResponse:
        """Raises `NoRoomError` if `has_room` returns False for a large body. Any error closes the connection."""
        if self._phase is not IDLE:
            raise TransportError(f"the connection to {self._peer} is closed", maybe_sent=False)
        self._phase = HEAD
        self._deadline = deadline
        self._has_room = has_room
        self._interim_answers = 0
        self.exchanges += 1
        answer: asyncio.Future[ClientResponse] = self._loop.create_future()
        self._answer = answer
        try:
            self._sending = len(pieces) > 1
            self._transport.write(head + pieces[0] if pieces else head)
            if self._sending:
                await self._write_rest(pieces, answer)
            self._heard_at = self._loop.time()
            return await answer
        except BaseException:
            self.abort()
            raise

    def release(self) -> bool:
        """Ends the use of a response; returns whether the connection can carry another request."""
        reusable = self._phase is HELD and self._head is not None and self._head.keep_alive
        if self._buffer is not self._own:
            self._buffers.give_back(self._buffer)
            self._buffer, self._view = self._own, self._own_view
        if not reusable:
            self.abort()
            return False
        self._phase = IDLE
        self._head = None
        self._end = 0
        self.idle_since = self._loop.time()
        return True

    def abort(self) -> None:
        if self._phase is not CLOSED:
            self._phase = CLOSED
            self._answer = None
            self._transport.abort()

    def fail(self, error: TransportError) -> None:
        answer = self._answer
        self.abort()
        if answer is not None and not answer.done():
            answer.set_exception(error)

    def check(self, now: float) -> None:
        """Fails a call whose deadline or read timeout has passed."""
        if self._answer is None:
            return
        if now >= self._deadline:
            self.fail(TransportError(f"{self._peer} sent no complete response in time"))
        elif not self._sending and now - self._heard_at >= self._timeouts.read:
            self.fail(
                TransportError(f"{self._peer} sent nothing for {self._timeouts.read:g} s in the middle of a call")
            )

    async def wait_closed(self) -> None:
        await asyncio.shield(self._closed)

    # Sending

    async def _write_rest(self, pieces: Sequence[bytes], answer: asyncio.Future[ClientResponse]) -> None:
        for piece in pieces[1:]:
            if self._drained is not None:
                await self._drained
            if answer.done():  # the server answered early, or the connection was lost
                return
            self._transport.write(piece)
        self._sending = False

    def pause_writing(self) -> None:
        if self._drained is None:
            self._drained = self._loop.create_future()

    def resume_writing(self) -> None:
        drained, self._drained = self._drained, None
        if drained is not None and not drained.done():
            drained.set_result(None)

    # Receiving

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def get_buffer(self, sizehint: int) -> memoryview:  # noqa: ARG002 -- our buffer is larger than asyncio's constant hint
        return self._view[self._end :]

    def buffer_updated(self, nbytes: int) -> None:
        self._end += nbytes
        self._heard_at = self._loop.time()
        phase = self._phase
        try:
            if phase is HEAD:
                self._read_head(self._end - nbytes)
            elif phase is BODY:
                self._read_body()
            elif phase is UNMEASURED:
                self._read_unmeasured()
            else:
                self._end = 0
                self.fail(TransportError(f"{self._peer} sent bytes without a request"))
        except TransportError as error:
            self.fail(error)
            self._end = 0  # asyncio must never get an empty buffer, not even from a closed connection

    def connection_lost(self, exc: Exception | None) -> None:
        if not self._closed.done():
            self._closed.set_result(None)
        self.resume_writing()
        if self._phase is UNMEASURED and self._chunks is None and exc is None:
            self._complete(memoryview(self._collected))
            return
        has_answered = self._end > 0 or self._interim_answers > 0
        self.dropped_before_answer = self._phase is HEAD and self.exchanges > 1 and not has_answered
        reason = f": {exc}" if exc else ""
        self.fail(TransportError(f"{self._peer} closed the connection before its response was complete{reason}"))

    def _read_head(self, seen: int) -> None:
        head_end = self._buffer.find(b"\r\n\r\n", max(0, seen - 3), self._end)
        if head_end < 0:
            if self._end >= len(self._buffer):
                raise TransportError(
                    f"the headers of the response from {self._peer} are longer than {len(self._buffer)} bytes"
                )
            return
        head = parse_response_head(bytes(self._view[:head_end]))
        body_start = head_end + 4
        if head.status < 200:
            self._skip_interim(head, body_start)
            return
        self._head = head
        if head.length >= 0:
            self._body_start, self._body_end = body_start, body_start + head.length
            if head.length > BODY_BYTES_MAX:
                raise TransportError(
                    f"the response from {self._peer} has {head.length} bytes; the limit is {BODY_BYTES_MAX}"
                )
            self._phase = BODY
            self._read_body()
        else:
            self._body_start = body_start
            self._collected = bytearray()
            self._chunks = ResponseChunks() if head.length == CHUNKED else None
            self._phase = UNMEASURED
            self._read_unmeasured()

    def _skip_interim(self, head: ResponseHead, body_start: int) -> None:
        self._interim_answers += 1
        if head.status == 101 or self._interim_answers > INTERIM_ANSWERS_MAX:
            raise TransportError(f"{self._peer} sent the unexpected status {head.status}")
        rest = bytes(self._view[body_start : self._end])
        self._view[: len(rest)] = rest
        self._end = len(rest)
        if rest:
            self._read_head(0)

    def _read_body(self) -> None:
        if self._end >= self._body_end:
            if self._end > self._body_end:
                raise TransportError(f"the response from {self._peer} is longer than its content-length")
            self._complete(self._view[self._body_start : self._body_end])
        elif self._body_end >= len(self._buffer):
            if self._buffer is self._own:
                self._ask_for_room(self._body_end - self._body_start)
            self._grow(self._body_end + 1)

    def _ask_for_room(self, body_bytes: int) -> None:
        if self._has_room is not None and not self._has_room(body_bytes):
            raise NoRoomError(f"there is no room for the {body_bytes} bytes of the response from {self._peer}")

    def _grow(self, needed: int) -> None:
        """Makes room for `needed` bytes, but for at most twice what has arrived."""
        if self._buffer is not self._own and self._end < len(self._buffer):
            return
        size = min(needed, max(_FIRST_ALLOCATION_BYTES_MAX, 2 * self._end))
        larger = self._buffers.borrow(size)
        view = memoryview(larger)
        view[: self._end] = self._view[: self._end]
        if self._buffer is not self._own:
            self._buffers.give_back(self._buffer)
        self._buffer, self._view = larger, view

    # Bodies without a content-length are rare, so they are collected in a second buffer

    def _read_unmeasured(self) -> None:
        chunks, view = self._chunks, self._view[self._body_start : self._end]
        for payload in [view] if chunks is None else chunks.feed(view):
            self._collect(payload)
        self._body_start = self._end = 0
        if chunks is not None and chunks.complete:
            if chunks.surplus:
                raise TransportError(f"{self._peer} sent bytes after its response")
            self._complete(memoryview(self._collected))

    def _collect(self, payload: memoryview) -> None:
        body_bytes = len(self._collected) + len(payload)
        if body_bytes > BODY_BYTES_MAX:
            raise TransportError(f"the response from {self._peer} is longer than {BODY_BYTES_MAX} bytes")
        if body_bytes > len(self._own):
            self._ask_for_room(body_bytes)
        self._collected += payload

    def _complete(self, body: memoryview) -> None:
        head, answer = self._head, self._answer
        assert head is not None
        self._phase = HELD
        self._answer = None
        if self._sending:
            head.keep_alive = False  # the request was not sent completely: its rest would be read as another request
        if answer is not None and not answer.done():
            answer.set_result(ClientResponse(head.status, head.headers, body))
