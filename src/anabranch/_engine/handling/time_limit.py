"""How long one handler call may take, and which calls take no notice when that is over.

A call is told to end when its time is up: an asynchronous one is cancelled, a process killed. Its record is tried again
only after the call has ended (rule D3), so one that goes on, in a thread or over its cancellation, holds up its key or
its shard. It is named then, with the place where it stands.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from traceback import StackSummary
from typing import Any, Final

from anabranch._engine.handling.stacks import place_in
from anabranch._ports.clock import Clock
from anabranch.records import Record

__all__ = ["TimeLimit"]

IGNORED_AFTER_MS: Final = 1_000
"""What a call gets to end in after it was told to, before it is said to take no notice."""


class TimeLimit:
    def __init__(self, clock: Clock, seconds: float | None) -> None:
        self._clock = clock
        self.seconds = seconds
        """None: there is none."""
        self._due_ms: dict[asyncio.Task[Any], int] = {}

    @asynccontextmanager
    async def of_call(self) -> AsyncIterator[None]:
        """Around the call that this task makes: raises TimeoutError where it ended because its time was up."""
        if self.seconds is None:
            yield
            return
        task = asyncio.current_task()
        assert task is not None
        self._due_ms[task] = self._clock.now_ms() + round(self.seconds * 1000)
        try:
            async with asyncio.timeout(self.seconds):
                yield
        finally:
            del self._due_ms[task]

    def is_ignored_by(self, task: "asyncio.Task[Any]", now_ms: int) -> bool:
        """Whether the call of this task goes on long after its time was up."""
        due_ms = self._due_ms.get(task)
        return due_ms is not None and now_ms >= due_ms + IGNORED_AFTER_MS

    def reason(self, record: Record[Any], stack: StackSummary) -> str:
        return (
            f"the handler of record {record.position} ignores its time-out of {self.seconds:g} s at {place_in(stack)}"
        )
