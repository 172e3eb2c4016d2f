"""Single key presses on a terminal, without Enter."""

import asyncio
import contextlib
import os
import re
import sys
from collections.abc import Callable, Iterator
from typing import Final

_ESCAPED: Final = re.compile(r"\x1b(?:\[|O)([0-9;]*[A-Za-z~])|.", re.DOTALL)
_NAMES: Final = {
    "A": "up",
    "B": "down",
    "H": "home",
    "F": "end",
    "1~": "home",
    "4~": "end",
    "5~": "page up",
    "6~": "page down",
}


def keys_in(text: str) -> list[str]:
    """Characters, and the names of the keys that terminals send as escape sequences. Unknown sequences are dropped."""
    return [
        found[0] if found[1] is None else _NAMES[found[1]]
        for found in _ESCAPED.finditer(text)
        if found[1] is None or found[1] in _NAMES
    ]


@contextlib.contextmanager
def listen(on_key: Callable[[str], None]) -> Iterator[bool]:
    """Calls `on_key` for each key; yields False if there is no terminal. Restores the terminal at the end."""
    if sys.stdin is None or not sys.stdin.isatty():
        yield False
        return
    import termios  # noqa: PLC0415 -- not on every platform
    import tty  # noqa: PLC0415 -- as above

    loop, descriptor = asyncio.get_running_loop(), sys.stdin.fileno()

    def on_input() -> None:
        for key in keys_in(os.read(descriptor, 64).decode(errors="replace")):
            on_key(key)

    before = termios.tcgetattr(descriptor)
    tty.setcbreak(descriptor)
    try:
        loop.add_reader(descriptor, on_input)
        yield True
    finally:
        loop.remove_reader(descriptor)
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)
