"""Single key presses of a terminal, without Enter; nothing where there is no terminal."""

import contextlib
import os
import sys
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def listen(add_reader: Callable[[int, Callable[[], None]], None], on_key: Callable[[str], None]) -> Iterator[bool]:
    """Calls back with each key while it lasts; True if there is a keyboard. Puts the terminal back as it was."""
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
