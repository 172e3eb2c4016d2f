"""Lines of standard input as they come, for commands that work on an event loop.

A thread reads, since nothing else works for files, pipes and terminals alike. It is a daemon: a read that never ends
must not keep the program from ending. It reads a little ahead, and no more.
"""

import asyncio
import os
import threading
from collections.abc import AsyncIterator
from typing import Final

from anabranch.errors import ConfigurationError
from anabranch.limits import RECORD_BYTES_MAX

__all__ = ["input_lines"]

_CHUNK_BYTES: Final = 1 << 16
_CHUNKS_AHEAD_MAX: Final = 4


async def input_lines(descriptor: int) -> AsyncIterator[bytes]:
    """Each line without its end; the last one may lack it."""
    chunks: asyncio.Queue[bytes] = asyncio.Queue()
    room = threading.Semaphore(_CHUNKS_AHEAD_MAX)
    loop = asyncio.get_running_loop()
    threading.Thread(target=_read, args=(descriptor, loop, chunks, room), daemon=True, name="anabranch-input").start()
    rest = bytearray()
    while chunk := await chunks.get():
        room.release()
        first, *others = chunk.split(b"\n")
        rest += first
        if others:
            yield bytes(rest).removesuffix(b"\r")
            for line in others[:-1]:
                yield line.removesuffix(b"\r")
            rest = bytearray(others[-1])
        if len(rest) > RECORD_BYTES_MAX:
            raise ConfigurationError(f"a line of standard input has more than the {RECORD_BYTES_MAX} bytes of a record")
    if rest:
        yield bytes(rest)


def _read(
    descriptor: int, loop: asyncio.AbstractEventLoop, chunks: "asyncio.Queue[bytes]", room: threading.Semaphore
) -> None:
    """In the thread. An empty chunk is the end."""
    chunk = b" "
    while chunk:
        room.acquire()
        try:
            chunk = os.read(descriptor, _CHUNK_BYTES)
        except OSError:  # a terminal that went away
            chunk = b""
        try:
            loop.call_soon_threadsafe(chunks.put_nowait, chunk)
        except RuntimeError:  # the loop has ended, and nobody reads any more
            return
