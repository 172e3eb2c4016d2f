"""Single key presses on a terminal, without Enter."""

import contextlib
import os
import sys
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def listen(add_reader: Callable[[int, Callable[[], None]], None], on_key: Callable[[str], None]) -> Iterator[bool]:
    """Calls `on_key` for each key; yields False if there is no terminal. Restores the terminal at the end."""
    if not sys.stdin.isatty():
        yield False
        return
    import termios  # noqa: PLC0415 -- not on every platform
    import tty  # noqa: PLC0415 -- as above

    descriptor = sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)
    tty.setcbreak(descriptor)
    try:
        add_reader(descriptor, lambda: on_key(os.read(descriptor, 1).decode(errors="replace")))
        yield True
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)
