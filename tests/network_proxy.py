"""A proxy between a worker and a server, which can be cut off: bytes are held back and delivered later, or never."""

import asyncio
from contextlib import suppress
from typing import Self


class NetworkProxy:
    """Forwards to a loopback port. It lives in the event loop that starts it. `host` is where it listens."""

    def __init__(self, target_port: int, host: str = "127.0.0.1") -> None:
        self._target_port = target_port
        self._host = host
        self._passes = asyncio.Event()
        self._passes.set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._writers: set[asyncio.StreamWriter] = set()
        self._server: asyncio.Server | None = None
        self.port = 0
        self.delay_seconds = 0.0
        """How long each piece takes to arrive."""
        self.loses_answers = False
        """Requests arrive, but the connection breaks before the response does."""

    async def start(self) -> Self:
        self._server = await asyncio.start_server(self._accept, self._host, 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    def cut(self) -> None:
        """From now on no byte passes, in either direction. Connections stay open, as when a cable is pulled."""
        self._passes.clear()

    def heal(self, *, drop: bool) -> None:
        """What was sent meanwhile arrives now; with `drop` it is lost, with its connections."""
        if drop:
            for writer in self._writers:
                writer.transport.abort()
        self._passes.set()

    def lead_to(self, target_port: int) -> None:
        """Sends new connections there, and breaks the existing ones."""
        self._target_port = target_port
        self.heal(drop=True)

    def on_request(self, data: bytes) -> None:
        """For subclasses that count requests."""

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            await self._passes.wait()
            with suppress(OSError):
                there_reader, there_writer = await asyncio.open_connection("127.0.0.1", self._target_port)
                await self._forward(reader, writer, there_reader, there_writer)
        except asyncio.CancelledError:
            pass  # closed with the proxy
        finally:
            writer.transport.abort()
            self._tasks.discard(task)

    async def _forward(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        there_reader: asyncio.StreamReader,
        there_writer: asyncio.StreamWriter,
    ) -> None:
        pair = {writer, there_writer}
        self._writers |= pair
        try:
            async with asyncio.TaskGroup() as group:
                pumps = [
                    group.create_task(self._pump(reader, there_writer)),
                    group.create_task(self._pump(there_reader, writer, has_answers=True)),
                ]
                await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
                for pump in pumps:
                    pump.cancel()
        finally:
            self._writers -= pair
            there_writer.transport.abort()

    async def _pump(
        self, source: asyncio.StreamReader, target: asyncio.StreamWriter, *, has_answers: bool = False
    ) -> None:
        with suppress(OSError):
            while data := await source.read(65_536):
                await self._passes.wait()
                await asyncio.sleep(self.delay_seconds)
                if not has_answers:
                    self.on_request(data)
                if has_answers and self.loses_answers and not data.startswith(b"HTTP/1.1 100 "):
                    return
                target.write(data)
                await target.drain()
