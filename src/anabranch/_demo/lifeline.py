"""What ties a process of the demo to the demo: its standard input is a pipe that ends with the demo."""

import os

from anabranch._engine.lifeline import tie_to

__all__ = ["end_with_the_demo"]

_STDIN = 0


def end_with_the_demo() -> None:
    tie_to(_STDIN, lambda: os._exit(1))
