"""Threads that run a plain handler: started as they are needed, and no reason for a process to live.

An executor's threads are joined when the interpreter ends, so that one call that never returns would keep a process
which has stopped long ago. These are not: what still runs then was told of by the stop that gave it up.
"""

import asyncio
import contextlib
import contextvars
import queue
import threading
from collections.abc import Callable
from typing import Any

__all__ = ["HandlerThreads"]

Call = Callable[[], Any]


class HandlerThreads:
    """Used by one event loop; only the queue is shared with the threads."""

    def __init__(self, count_max: int) -> None:
        self._count_max = count_max
        self._queue: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._thread_count = 0
        self._unsettled_count = 0
        """Calls that wait for a thread, or run in one."""
        self._closed = False

    def begin(self, call: Call) -> asyncio.Future[Any]:
        """Calls it in a thread, with the context variables of the caller; cancelling the future does not end it."""
        if self._closed:
            raise RuntimeError("the threads of this handler are closed")
        if self._thread_count <= self._unsettled_count and self._thread_count < self._count_max:
            name = f"anabranch-handler_{self._thread_count}"
            threading.Thread(target=_work, args=(self._queue,), name=name, daemon=True).start()
            self._thread_count += 1
        loop = asyncio.get_running_loop()
        outcome: asyncio.Future[Any] = loop.create_future()
        self._unsettled_count += 1
        self._queue.put(_Job(self, loop, outcome, contextvars.copy_context(), call))
        return outcome

    def settled(self) -> None:
        self._unsettled_count -= 1

    def close(self) -> None:
        """Calls that still wait for a thread are not made; those that run are not waited for."""
        if self._closed:
            return
        self._closed = True
        with contextlib.suppress(queue.Empty):
            while (job := self._queue.get_nowait()) is not None:
                job.outcome.cancel()
        for _ in range(self._thread_count):
            self._queue.put(None)


class _Job:
    """One call on its way through a thread."""

    __slots__ = ("_call", "_context", "_loop", "_threads", "outcome")

    def __init__(
        self,
        threads: HandlerThreads,
        loop: asyncio.AbstractEventLoop,
        outcome: asyncio.Future[Any],
        context: contextvars.Context,
        call: Call,
    ) -> None:
        self._threads = threads
        self._loop = loop
        self.outcome = outcome
        self._context = context
        self._call = call

    def run(self) -> None:
        """In the thread."""
        try:
            result = self._context.run(self._call)
        except BaseException as error:  # noqa: BLE001 -- whatever it is, it is raised where the call is awaited
            self.set_exception(error)
        else:
            self.set_result(result)

    def set_exception(self, error: BaseException) -> None:
        self._pass_on(self.outcome.set_exception, error)

    def set_result(self, result: Any) -> None:
        self._pass_on(self.outcome.set_result, result)

    def _pass_on(self, settle: Callable[[Any], None], outcome: Any) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody is left to be told
            self._loop.call_soon_threadsafe(self._settle, settle, outcome)

    def _settle(self, settle: Callable[[Any], None], outcome: Any) -> None:
        self._threads.settled()
        if not self.outcome.done():
            settle(outcome)


def _work(jobs: "queue.SimpleQueue[_Job | None]") -> None:
    """One thread, until it is told to end."""
    while (job := jobs.get()) is not None:
        job.run()
        del job  # not held while the next is waited for
