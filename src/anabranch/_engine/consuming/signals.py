"""SIGTERM and SIGINT end the runs of a process in order; a second one ends them at once.

An event loop has one handler a signal, and several consumers may run on it: the handler belongs to all of them.
"""

import asyncio
import signal
import weakref
from collections.abc import Iterator
from contextlib import contextmanager

from anabranch._engine.consuming.worker import Worker
from anabranch._engine.system_clock import SystemClock

__all__ = ["stop_on_signals"]


class _Runs:
    """The workers of one event loop that a signal stops, each with the time that it has for that."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = weakref.ref(loop)
        self._deadlines_ms: dict[Worker, int] = {}
        self._installed: list[signal.Signals] = []

    def add(self, worker: Worker, deadline_ms: int) -> None:
        if not self._deadlines_ms:
            self._install()
        self._deadlines_ms[worker] = deadline_ms

    def remove(self, worker: Worker) -> None:
        del self._deadlines_ms[worker]
        if not self._deadlines_ms and (loop := self._loop()) is not None:
            while self._installed:
                loop.remove_signal_handler(self._installed.pop())

    def _install(self) -> None:
        loop = self._loop()
        assert loop is not None
        for number in (signal.SIGTERM, signal.SIGINT):
            try:
                loop.add_signal_handler(number, self._on_signal)
            except (NotImplementedError, RuntimeError, ValueError):
                continue  # not the main thread, or a loop without signals: the program handles them
            self._installed.append(number)

    def _on_signal(self) -> None:
        now_ms = SystemClock().now_ms()
        for worker, deadline_ms in self._deadlines_ms.items():
            worker.stop(now_ms + (0 if worker.is_stopping else deadline_ms))


_runs: "weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, _Runs]" = weakref.WeakKeyDictionary()
"""Of this process, as its signals are."""


@contextmanager
def stop_on_signals(worker: Worker, deadline_ms: int) -> Iterator[None]:
    loop = asyncio.get_running_loop()
    runs = _runs.setdefault(loop, _Runs(loop))
    runs.add(worker, deadline_ms)
    try:
        yield
    finally:
        runs.remove(worker)
