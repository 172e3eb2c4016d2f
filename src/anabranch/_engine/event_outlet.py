"""Where events go: into the log, then to the user's `on_event`, which cannot disturb what it watches."""

import logging
from collections.abc import Callable

from anabranch.events import Event

__all__ = ["event_outlet"]

_log = logging.getLogger("anabranch")


def event_outlet(on_event: Callable[[Event], None] | None) -> Callable[[Event], None]:
    def emit(event: Event) -> None:
        _log.log(event.level, "%s", event)
        if on_event is not None:
            try:
                on_event(event)
            except Exception:  # noqa: BLE001 -- a user's hook must not end a worker or a writer
                _log.exception("on_event failed for: %s", event)

    return emit
