"""The caller's own loop over a run: it asks for one thing after another, and waits where there is none yet.

Not an asynchronous generator: one whose step was cancelled is over for good, so a loop that gives each step a time-out
would end in silence. A cancelled step of this one has taken nothing, and the next goes on from there.

Whoever made it may hold it weakly: a loop that was left holds it no more.
"""

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Generic, TypeVar

__all__ = ["Iteration"]

T = TypeVar("T")
Begin = Callable[[], Awaitable[Callable[[], T | None]]]


class Iteration(AsyncIterator[T], Generic[T]):
    __slots__ = ("__weakref__", "_begin", "_is_over", "_next", "closed", "is_called_off")

    def __init__(self, begin: Begin[T], is_over: Callable[[], Awaitable[bool]]) -> None:
        self._begin: Begin[T] | None = begin
        self._is_over = is_over
        self._next: Callable[[], T | None] = _nothing
        """The next one, or None if there is none at this moment."""
        self.closed = False
        self.is_called_off: Callable[[], bool] = lambda: False
        """Asked before it begins: whether it has been stopped already."""

    async def __anext__(self) -> T:
        while (found := self._next()) is None:
            if await self._ends():
                raise StopAsyncIteration
        return found

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
