"""SIGTERM and SIGINT end a run in order; a second one ends it at once."""

import asyncio
import signal
from collections.abc import Iterator
from contextlib import contextmanager

from anabranch._engine.system_clock import SystemClock
from anabranch._engine.worker import Worker

__all__ = ["stop_on_signals"]


@contextmanager
def stop_on_signals(worker: Worker, deadline_ms: int) -> Iterator[None]:
    loop = asyncio.get_running_loop()
    installed: list[signal.Signals] = []

    def on_signal() -> None:
        worker.stop(SystemClock().now_ms() + (0 if worker.is_stopping else deadline_ms))

    for number in (signal.SIGTERM, signal.SIGINT):
        try:
            loop.add_signal_handler(number, on_signal)
        except (NotImplementedError, RuntimeError, ValueError):
            continue  # not the main thread, or a loop without signals: the program handles them
        installed.append(number)
    try:
        yield
    finally:
        for number in installed:
            loop.remove_signal_handler(number)
