"""How long a test waits for something before it calls it hung: long, because only a test that fails waits so long."""

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

PATIENCE = 60.0


def wait_for(look: Callable[[], T], what: str) -> T:
    """Looks until there is something, and returns it."""
    deadline = time.monotonic() + PATIENCE
    while not (found := look()):
        if time.monotonic() > deadline:
            raise TimeoutError(f"waited {PATIENCE:.0f} s for: {what}")
        time.sleep(0.02)
    return found
