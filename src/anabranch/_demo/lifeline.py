"""What ties a process of the demo to the demo: a pipe as its standard input, which the demo never writes to.

The pipe ends when the demo is gone, even by `kill -9`, and the process ends with it.
"""

import os
import threading

__all__ = ["end_with_the_demo"]

_STDIN = 0


def end_with_the_demo() -> None:
    threading.Thread(target=_wait_and_end, name="end with the demo", daemon=True).start()


def _wait_and_end() -> None:
    os.read(_STDIN, 1)
    os._exit(1)
