"""Tasks and their errors: the background task of a consumer or producer, tasks in groups, and the errors of groups.

Also `on_parent_exit`, for worker processes that must not outlive their parent.
"""

import asyncio
import concurrent.futures
import os
import threading
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any

from anabranch.errors import UsageError


class BackgroundTask:
    """The one background task of a consumer or producer. All its other tasks run in groups inside this task, so a
    consumer or producer can be opened in one task and closed in another, which a task group cannot. Only this class and
    `Dispatcher` create tasks outside a group.
    """

    def __init__(self) -> None:
        self._task: asyncio.Task[None] | None = None
        self._ended: concurrent.futures.Future[None] = concurrent.futures.Future()
        """Set when the task has ended, for waiters on other event loops."""

    def start(self, work: Coroutine[Any, Any, None], name: str) -> None:
        assert self._task is None, "started twice"
        self._task = asyncio.get_running_loop().create_task(work, name=name)
        self._task.add_done_callback(lambda _: self._ended.set_result(None))

    @property
    def is_started(self) -> bool:
        return self._task is not None

    @property
    def is_running(self) -> bool:
        return self._task is not None and not self._task.done()

    @property
    def error(self) -> BaseException | None:
        """The error that ended the task: the cause itself, not the group around it."""
        task = self._task
        if task is None or not task.done() or task.cancelled():
            return None
        return single_cause(task.exception())

    async def wait(self) -> None:
        """Waits until the task has ended. Cancelling the waiter does not cancel the task."""
        if self._task is None or self._task.done():
            return
        if self.is_on_this_loop:
            await asyncio.wait([self._task])
        else:
            await asyncio.shield(asyncio.wrap_future(self._ended))

    @property
    def is_on_this_loop(self) -> bool:
        """Whether the task runs, or ran, on the caller's event loop."""
        return self._task is None or self._task.get_loop() is asyncio.get_running_loop()

    def call_on_its_loop(self, callback: Callable[[], None]) -> None:
        """Calls it on the task's event loop; directly if the caller is on that loop."""
        if self._task is None or self.is_on_this_loop:
            callback()
            return
        loop = self._task.get_loop()
        if not loop.is_running():
            raise UsageError("the consumer's event loop is not running: await its stop() on that loop")
        with suppress(RuntimeError):  # the loop was just closed, which ended the task
            loop.call_soon_threadsafe(callback)

    def cancel_soon(self) -> None:
        if self._task is not None:
            self._task.cancel()

    async def cancel(self) -> None:
        """Cancels the task and waits until it has ended."""
        if self._task is not None and not self._task.done():
            self._task.cancel()
            await asyncio.wait([self._task])


def single_cause(error: BaseException | None) -> BaseException | None:
    """The first error of a group, with the others as notes. Users never see our exception groups."""
    while isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
        error = error.exceptions[0]
    if isinstance(error, BaseExceptionGroup):
        first, *others = error.exceptions
        for other in others:
            _note(first, f"also: {other!r}")
        return single_cause(first)
    return error


def attach_failure(failure: BaseException, error: BaseException) -> None:
    """Makes `error` carry `failure`: as a note, and at the start of the chain of errors that a traceback shows."""
    _note(error, f"the consumer also failed: {type(failure).__name__}: {failure}")
    first = error
    while first is not failure and first.__context__ is not None:
        first = first.__context__
    if first is not failure:
        first.__context__ = failure


def _note(error: BaseException, note: str) -> None:
    if note not in getattr(error, "__notes__", ()):
        error.add_note(note)


def start_in_group(group: asyncio.TaskGroup, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None] | None:
    """Starts a task in the group. Returns None, without an error, if the group is already shutting down."""
    try:
        return group.create_task(work, name=name)
    except RuntimeError:
        work.close()
        return None


def on_parent_exit(file_descriptor: int, then: Callable[[], object]) -> None:
    """Calls `then` from a daemon thread when the parent process has ended. `file_descriptor` is the read end of a pipe
    whose write end only the parent has open.
    """

    def wait() -> None:
        os.read(file_descriptor, 1)  # the parent writes nothing: this returns when its end is closed
        then()

    threading.Thread(target=wait, name="parent-exit", daemon=True).start()
