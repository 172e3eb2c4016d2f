"""A server that sends exactly what a test tells it to send: one coroutine for each connection, and no protocol."""

import asyncio
import re
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress

from patience import PATIENCE

Conversation = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]

_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)


class CannedServer:
    def __init__(self, port: int) -> None:
        self.port = port
        self.connections = 0
        self.open = 0
        self._none_open = asyncio.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def all_gone(self) -> None:
        async with asyncio.timeout(PATIENCE):
            while self.open:
                self._none_open.clear()
                await self._none_open.wait()

    def came(self) -> None:
        self.connections += 1
        self.open += 1

    def went(self) -> None:
        self.open -= 1
        self._none_open.set()


@asynccontextmanager
async def canned_server(conversation: Conversation, tls: ssl.SSLContext | None = None) -> AsyncIterator[CannedServer]:
    canned = CannedServer(0)
    tasks: set[asyncio.Task[None]] = set()

    async def converse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        tasks.add(task)
        canned.came()
        try:
            with suppress(ConnectionError, asyncio.IncompleteReadError, ssl.SSLError, asyncio.CancelledError):
                await conversation(reader, writer)
        finally:
            canned.went()
            writer.transport.abort()
            tasks.discard(task)

    server = await asyncio.start_server(converse, "127.0.0.1", 0, ssl=tls)
    canned.port = server.sockets[0].getsockname()[1]
    try:
        yield canned
    finally:
        server.close()
        for task in list(tasks):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await server.wait_closed()


async def read_request(reader: asyncio.StreamReader) -> bytes:
    """Head and body of one request."""
    head = await reader.readuntil(b"\r\n\r\n")
    found = _LENGTH.search(head)
    return head + (await reader.readexactly(int(found[1])) if found else b"")


def answer(body: bytes, status: bytes = b"200 OK", headers: bytes = b"") -> bytes:
    return b"HTTP/1.1 %s\r\n%scontent-length: %d\r\n\r\n%s" % (status, headers, len(body), body)
