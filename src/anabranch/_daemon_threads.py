"""Threads for blocking calls and plain handlers. They work until the process ends, and do not keep it alive.

The standard executors join their threads at interpreter exit, so one call that never returns would keep a stopped
process alive. They also accept no calls once interpreter shutdown has begun, which is before `atexit` hooks run. But
then a producer that delivers its last records must still resolve names and load credentials. From Python 3.12 on, no
thread can be started then either, so `start` starts them in advance.
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
    """Inherits `ThreadPoolExecutor` because `loop.set_default_executor` requires it, but starts its own threads."""

    def __init__(self, count_max: int, name: str) -> None:
        super().__init__(count_max, thread_name_prefix=name)
        self._count_max = count_max
        self._name = name
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._idle: list[None] = []
        """One item for each idle thread. Threads append to it, which is atomic and much cheaper than a semaphore."""
        self._count = 0
        self._lock = threading.Lock()
        self._is_shut_down = False
        self._end = weakref.finalize(self, _end, self._jobs, count_max)
        self._end.atexit = False

    def start(self) -> None:
        """Starts all threads."""
        with self._lock:
            while self._count < self._count_max:
                self._start_one()
                self._idle.append(None)

    def _start_one(self) -> None:
        name = f"{self._name}_{self._count}"
        threading.Thread(target=_work, args=(self._jobs, self._idle), name=name, daemon=True).start()
        self._count += 1

    def submit(self, function: Callable[P, T], /, *arguments: P.args, **options: P.kwargs) -> "Future[T]":
        with self._lock:
            if self._is_shut_down:
                raise RuntimeError("cannot schedule new futures after shutdown")
            if self._idle:
                self._idle.pop()
            elif self._count < self._count_max:
                self._start_one()
            future: Future[T] = Future()
            self._jobs.put((future, function, arguments, options))
            return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:  # noqa: ARG002, FBT001, FBT002 -- as declared
        """Never waits for running calls, even if `wait` is true: nobody needs their results."""
        with self._lock:
            was_shut_down, self._is_shut_down = self._is_shut_down, True
        if was_shut_down:
            return
        if cancel_futures:
            with contextlib.suppress(queue.Empty):
                while (job := self._jobs.get_nowait()) is not None:
                    job[0].cancel()
        self._end()


def _end(jobs: "queue.SimpleQueue[_Job | None]", count: int) -> None:
    for _ in range(count):
        jobs.put(None)


def _work(jobs: "queue.SimpleQueue[_Job | None]", idle: list[None]) -> None:
    """The body of a thread."""
    while (job := jobs.get()) is not None:
        _perform(idle, job)
        del job  # frees it before the next wait


def _perform(idle: list[None], job: _Job) -> None:
    """Counts the thread as idle before it sets the outcome, so that a caller's next call can use the same thread."""
    future, function, arguments, options = job
    if not future.set_running_or_notify_cancel():
        idle.append(None)
        return
    try:
        result = function(*arguments, **options)
    except BaseException as error:  # noqa: BLE001 -- it is raised where the call is awaited
        idle.append(None)
        future.set_exception(error)
    else:
        idle.append(None)
        future.set_result(result)
