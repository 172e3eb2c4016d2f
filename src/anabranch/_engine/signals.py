"""SIGTERM and SIGINT stop the runs of a process gracefully; a second one stops them at once (rule O3).

A program that handles signals itself, such as a web server, keeps its handlers. We use `signal.signal` instead of
`loop.add_signal_handler`, because only the former returns the replaced handler, which we restore afterwards.
"""

import asyncio
import functools
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from types import FrameType
from typing import Any

from anabranch._engine.clock import SystemClock
from anabranch._engine.consumer_run import ConsumerRun
from anabranch.errors import UsageError


class _SignalHandler:
    """Our handler of one signal, shared by all runs of this process."""

    def __init__(self, number: signal.Signals, before: Any) -> None:
        self._number = number
        self.before = before
        """What handled the signal before us."""
        self._runs: dict[ConsumerRun, asyncio.AbstractEventLoop] = {}
        self._process_id = os.getpid()

    @property
    def is_inherited(self) -> bool:
        """Whether this process is a fork of the one that started the runs."""
        return os.getpid() != self._process_id

    @contextmanager
    def stopping(self, run: ConsumerRun) -> Iterator[None]:
        self._runs[run] = asyncio.get_running_loop()
        try:
            yield
        finally:
            del self._runs[run]
            installed: object = signal.getsignal(self._number)
            if not self._runs and installed is self:
                signal.signal(self._number, signal.SIG_DFL if self.before is None else self.before)

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if not self._runs or self.is_inherited:
            self._pass_on(number, frame)
            return
        for run, loop in tuple(self._runs.items()):
            with suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(self._stop, run)

    def _stop(self, run: ConsumerRun) -> None:
        if run not in self._runs:
            return
        if run.is_stopping:
            run.stop_by(SystemClock().now_ms())
        else:
            run.stop_gracefully()

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        """A program that replaced our handler may restore it after the runs have ended."""
        if callable(self.before):
            self.before(number, frame)
        elif self.before == signal.SIG_DFL:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)


@contextmanager
def stop_on_signals(run: ConsumerRun, *, handle_signals: bool | None) -> Iterator[None]:
    """`None` takes only signals that nothing else handles, `True` takes both, `False` takes none."""
    in_main_thread = threading.current_thread() is threading.main_thread()
    if handle_signals and not in_main_thread:
        raise UsageError(
            "handle_signals=True works only in the main thread, where Python delivers signals: leave it out, and call "
            "consumer.stop() from your own signal handling"
        )
    with ExitStack() as stack:
        if handle_signals is not False and in_main_thread:
            for number in (signal.SIGTERM, signal.SIGINT):
                if (handler := _take(number, by_force=bool(handle_signals))) is not None:
                    stack.enter_context(handler.stopping(run))
        yield


def _take(number: signal.Signals, *, by_force: bool) -> _SignalHandler | None:
    found: Any = signal.getsignal(number)
    if isinstance(found, _SignalHandler):
        if not found.is_inherited:
            return found
        found = found.before
    if not by_force and not _is_free(number, found):
        return None
    handler = _SignalHandler(number, found)
    signal.signal(number, handler)
    return handler


def _is_free(number: signal.Signals, found: Any) -> bool:
    if number is signal.SIGTERM:
        return bool(found == signal.SIG_DFL)
    # asyncio.run() installs a method of its Runner, which cancels the main task.
    owner = getattr(found.func, "__self__", None) if isinstance(found, functools.partial) else None
    return found is signal.default_int_handler or isinstance(owner, asyncio.Runner)
