"""Which sessions may have something to hand out, and who waits for it.

Sessions are served in turn, so that a busy shard does not starve a quiet one. A session that has nothing leaves the
shelf and is offered again when that may have changed; so does one that has handed out what it may hand out at a time.
Each waiter that finds work wakes the next, so that one page of records does not wake thirty runners at once.
"""

import asyncio
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import TypeVar

from anabranch._engine.session import Session

__all__ = ["Shelf"]

T = TypeVar("T")


class Shelf:
    def __init__(self, *, one_at_a_time: bool = False) -> None:
        self._one_at_a_time = one_at_a_time
        """What a session has handed out must be finished before there is more of it: who finishes it offers again."""
        # Not a dict: finding the first key of one whose first keys were deleted takes ever longer.
        self._ready: OrderedDict[Session, None] = OrderedDict()
        self._waiters: deque[asyncio.Future[None]] = deque()

    def offer(self, session: Session) -> None:
        self._ready[session] = None
        self.wake()

    def put_back(self, session: Session) -> None:
        """As `offer`, by one who looks again before it waits: nobody else is woken for it."""
        self._ready[session] = None

    def withdraw(self, session: Session) -> None:
        self._ready.pop(session, None)

    def take(self, pick: Callable[[Session], T | None]) -> tuple[Session, T] | None:
        """The first thing that a session in turn has to hand out."""
        while self._ready:
            session, _ = self._ready.popitem(last=False)
            picked = pick(session)
            if picked is not None:
                if not self._one_at_a_time:
                    self._ready[session] = None
                if self._waiters and self._ready:
                    self.wake()
                return session, picked
        return None

    def wake(self) -> None:
        while self._waiters:
            waiter = self._waiters.popleft()
            if not waiter.done():
                waiter.set_result(None)
                return

    def wake_all(self) -> None:
        while self._waiters:
            self.wake()

    async def wait(self) -> None:
        """Until something may be there; the caller looks again."""
        waiter = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        try:
            await waiter
        except asyncio.CancelledError:
            if waiter.done() and not waiter.cancelled():
                self.wake()  # it was this waiter's turn: pass it on
            raise
