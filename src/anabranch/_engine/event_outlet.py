"""Where events go: into the log, then to the user's `on_event`, which cannot disturb what it watches."""

import inspect
import logging
from collections.abc import Callable
from typing import Any

from anabranch.errors import ConfigurationError
from anabranch.events import Event

__all__ = ["event_outlet"]

_log = logging.getLogger("anabranch")


def event_outlet(on_event: Callable[[Event], Any] | None) -> Callable[[Event], None]:
    if on_event is not None:
        _check(on_event)

    def emit(event: Event) -> None:
        _log.log(event.level, "%s", event)
        if on_event is not None:
            try:
                on_event(event)
            except Exception:  # noqa: BLE001 -- a user's hook must not end a worker or a writer
                _log.exception("on_event failed for: %s", event)

    return emit


def _check(hook: object) -> None:
    called = (hook, getattr(hook, "__call__", None))  # noqa: B004 -- an object may have one of its own
    if not callable(hook) or any(map(inspect.iscoroutinefunction, called)):
        raise ConfigurationError(f"on_event={hook!r}: it takes a plain function of an event")
