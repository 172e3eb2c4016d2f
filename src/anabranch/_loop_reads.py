"""Reads state from any thread, on the event loop that owns it: no other code of the loop runs meanwhile."""

import asyncio
from collections.abc import Callable
from concurrent.futures import Future
from typing import Final, TypeVar

T = TypeVar("T")


def running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


READ_WAIT_SECONDS: Final = 1.0
"""The default timeout of a Kubernetes probe: a loop that is busy for longer is not ready."""


def read_on(loop: asyncio.AbstractEventLoop, read: Callable[[], T]) -> T:
    """Raises TimeoutError if the loop is busy for more than a second, and RuntimeError if it is closed."""
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
