"""Threads for blocking calls. They work until the process ends, and do not keep it alive.

The standard executors accept no calls once interpreter shutdown has begun, which is before `atexit` hooks run. A
producer that delivers its last records then still has to look up names and credentials. From Python 3.12 on, no thread
can be started then either, so `start` starts them in advance.
"""

import contextlib
import queue
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

_Job = tuple["Future[Any]", Callable[..., Any], tuple[Any, ...], dict[str, Any]]


class DaemonThreads(ThreadPoolExecutor):
    """A `ThreadPoolExecutor` only in type, as `loop.set_default_executor` requires: the threads are our own."""

    def __init__(self, count: int, name: str) -> None:
        super().__init__(count, thread_name_prefix=name)
        self._count = count
        self._name = name
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._starting = threading.Lock()
        self._is_started = False
        self._is_shut_down = False
        self._end = weakref.finalize(self, _end, self._jobs, count)
        self._end.atexit = False

    def start(self) -> None:
        """Starts the threads. The first call does this, too."""
        with self._starting:
            if not self._is_started:
                self._is_started = True
                for number in range(self._count):
                    name = f"{self._name}_{number}"
                    threading.Thread(target=_work, args=(self._jobs,), name=name, daemon=True).start()

    def submit(self, function: Callable[P, T], /, *arguments: P.args, **options: P.kwargs) -> "Future[T]":
        if self._is_shut_down:
            raise RuntimeError("cannot schedule new futures after shutdown")
        self.start()
        future: Future[T] = Future()
        self._jobs.put((future, function, arguments, options))
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:  # noqa: ARG002, FBT001, FBT002 -- as declared
        """Never waits for running calls, even if `wait` is true: nobody needs their results."""
        self._is_shut_down = True
        if cancel_futures:
            with contextlib.suppress(queue.Empty):
                while (job := self._jobs.get_nowait()) is not None:
                    job[0].cancel()
        self._end()


def _end(jobs: "queue.SimpleQueue[_Job | None]", count: int) -> None:
    for _ in range(count):
        jobs.put(None)


def _work(jobs: "queue.SimpleQueue[_Job | None]") -> None:
    """The body of a thread."""
    while (job := jobs.get()) is not None:
        future, function, arguments, options = job
        if future.set_running_or_notify_cancel():
            try:
                future.set_result(function(*arguments, **options))
            except BaseException as error:  # noqa: BLE001 -- it is raised where the call is awaited
                future.set_exception(error)
        del job, future, function, arguments, options  # frees them before the next wait
