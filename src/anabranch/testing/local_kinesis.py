"""The local Kinesis on a thread of its own, for tests that are not asynchronous themselves."""

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

from anabranch.local import LocalKinesis

__all__ = ["run_local_kinesis"]


@contextmanager
def run_local_kinesis(**options: Any) -> Iterator[LocalKinesis]:
    """Takes the options of `LocalKinesis`; its `endpoint_url` and `environment()` are what a client needs."""
    started: Future[tuple[LocalKinesis, asyncio.AbstractEventLoop, asyncio.Event]] = Future()

    async def main() -> None:
        stop = asyncio.Event()
        try:
            async with LocalKinesis(**options) as kinesis:
                started.set_result((kinesis, asyncio.get_running_loop(), stop))
                await stop.wait()
        except Exception as error:
            if started.done():
                raise
            started.set_exception(error)

    thread = threading.Thread(target=lambda: asyncio.run(main()), name="local-kinesis", daemon=True)
    thread.start()
    kinesis, loop, stop = started.result()
    try:
        yield kinesis
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join()
