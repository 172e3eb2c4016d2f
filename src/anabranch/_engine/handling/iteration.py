"""The caller's own loop over a run: it asks for one thing after another, and waits where there is none yet.

Not an asynchronous generator: one whose step was cancelled is over for good, so a loop that gives each step a time-out
would end in silence. A cancelled step of this one has taken nothing, and the next goes on from there.

Asking for the next record acknowledges the one before. So only one task at a time may use an iterator: a second task
would acknowledge what the first still works on. A task that has ended is no longer in the way, because some ways of
waiting make a task for each step (`asyncio.wait_for` on Python 3.11).

Whoever made it may hold it weakly: a loop that was left holds it no more.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Generic, TypeVar

from anabranch.errors import UsageError

__all__ = ["Iteration"]

T = TypeVar("T")
Begin = Callable[[], Awaitable[Callable[[], T | None]]]


class Iteration(AsyncIterator[T], Generic[T]):
    __slots__ = ("__weakref__", "_begin", "_is_over", "_next", "_task", "_tasks_share", "closed", "is_called_off")

    def __init__(self, begin: Begin[T], is_over: Callable[[], Awaitable[bool]], *, tasks_share: bool = False) -> None:
        self._begin: Begin[T] | None = begin
        self._is_over = is_over
        self._next: Callable[[], T | None] = _nothing
        """The next one, or None if there is none at this moment."""
        self._task: asyncio.Task[Any] | None = None
        """The task that waits for a step, or works on what the last step returned."""
        self._tasks_share = tasks_share
        """Several tasks may take steps, because a step acknowledges nothing."""
        self.closed = False
        self.is_called_off: Callable[[], bool] = lambda: False
        """Asked before it begins: whether it has been stopped already."""

    async def __anext__(self) -> T:
        task = asyncio.current_task()
        if self._task is not task:
            self._enter(task)
        while (found := self._next()) is None:
            is_over = True
            try:
                is_over = await self._ends()
            finally:
                if is_over:
                    self._task = None  # this step has acknowledged the record before, and returns none
            if is_over:
                raise StopAsyncIteration
        return found

    def _enter(self, task: "asyncio.Task[Any] | None") -> None:
        if self._tasks_share:
            return
        if self._task is not None and not self._task.done():
            raise UsageError(
                f"task {self._task.get_name()!r} is using this iterator: asking for the next record acknowledges the "
                "one that it works on. To work on several records at once, use consumer.run(handler), share out the "
                'records of consumer.batches(), or set Consumer(acknowledge="manual") and call consumer.ack(record)'
            )
        self._task = task

    async def _ends(self) -> bool:
        """Waits until there may be more; True if there will be none."""
        if self.closed:
            return True
        if self._begin is None:
            return await self._is_over()
        if self.is_called_off():
            self.closed = True
            return True
        self._next = await self._begin()
        self._begin = None
        return False

    async def aclose(self) -> None:
        """The loop is left: nothing more is handed out, and what is in hand is not acknowledged by that."""
        self.closed = True
        self._next = _nothing


def _nothing() -> None:
    return None
