"""What ties a process to the one that started it: a pipe that the other holds open and never writes to.

The pipe ends when the other is gone, however it went, even by `kill -9`: then there is nobody left to end this one.
"""

import os
import threading
from collections.abc import Callable

__all__ = ["tie_to"]


def tie_to(file_descriptor: int, then: Callable[[], object]) -> None:
    """Calls `then` once the pipe has ended, on a thread that keeps nothing alive."""

    def wait() -> None:
        os.read(file_descriptor, 1)
        then()

    threading.Thread(target=wait, name="lifeline", daemon=True).start()
