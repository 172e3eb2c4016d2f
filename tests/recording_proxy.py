"""A proxy between a client and an AWS service, which notes the operation of each call."""

import asyncio
import re
from collections import Counter
from typing import Any, Self

_LENGTH = re.compile(rb"content-length: *(\d+)", re.IGNORECASE)
_TARGET = re.compile(rb"x-amz-target: *\w+\.(\w+)", re.IGNORECASE)


class RecordingProxy:
    """Forwards to a loopback port. It lives in the event loop that starts it. Subclasses may change requests."""

    def __init__(self, target_port: int) -> None:
        self._target_port = target_port
        self.operations: Counter[str] = Counter()
        self._tasks: set[asyncio.Task[Any]] = set()
        self.port = 0

    async def start(self) -> Self:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def close(self) -> None:
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def outgoing(self, operation: str, body: bytes) -> bytes:
        return body

    def incoming(self, operation: str, body: bytes) -> None:
        self.operations[operation] += 1

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        there_reader, there_writer = await asyncio.open_connection("127.0.0.1", self._target_port, limit=1 << 24)
        try:
            while True:
                head, body = await _message(reader)
                found = _TARGET.search(head)
                assert found is not None, head
                operation = found[1].decode()
                body = self.outgoing(operation, body)
                there_writer.write(_LENGTH.sub(b"content-length: %d" % len(body), head) + body)
                head, body = await _message(there_reader)
                self.incoming(operation, body)
                writer.write(head + body)
        except (asyncio.IncompleteReadError, OSError, asyncio.CancelledError):
            pass  # closed
        finally:
            for one in (writer, there_writer):
                one.transport.abort()
            self._tasks.discard(task)


async def _message(reader: asyncio.StreamReader) -> tuple[bytes, bytes]:
    head = await reader.readuntil(b"\r\n\r\n")
    length = _LENGTH.search(head)
    return head, await reader.readexactly(int(length[1])) if length else b""
