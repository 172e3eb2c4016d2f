"""The tasks that run the handler, and the one who owns them: they start, fail, and end with the worker, if they do end.

A task ends when its call does, and an asynchronous call may take no notice of its cancellation. A worker that waited
for it in its task group would never end, nor would its process. So it gets a while to end in, is named then, and is let
go of: it is kept here until it ends by itself, and nobody waits for it any more, the end of the event loop included.
"""

import asyncio
from collections.abc import Callable
from typing import Any, Self

from anabranch._engine.handling.sinks import Sink
from anabranch._engine.handling.time_limit import IGNORED_AFTER_MS
from anabranch._ports.clock import Clock

__all__ = ["RunnerTasks"]


class RunnerTasks:
    def __init__(self, clock: Clock, on_failed: Callable[[BaseException], None]) -> None:
        self._clock = clock
        self._on_failed = on_failed
        self._tasks: dict[asyncio.Task[None], None] = {}
        self._let_go: dict[asyncio.Task[None], None] = {}
        self._told_ms: int | None = None
        """When they were told to end."""
        self._on_deaf: Callable[[], None] = lambda: None

    def start(self, sink: Sink, *, on_deaf: Callable[[], None]) -> None:
        """`on_deaf` is called before tasks are let go of, whose calls still run then."""
        self._on_deaf = on_deaf
        loop = asyncio.get_running_loop()
        for number in range(sink.runner_count):
            task = loop.create_task(sink.run_one(), name=f"runner {number}")
            self._tasks[task] = None
            task.add_done_callback(self._on_done)

    def __contains__(self, task: asyncio.Task[Any] | None) -> bool:
        return task in self._tasks or task in self._let_go

    def _on_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.pop(task, None)
        self._let_go.pop(task, None)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._on_failed(error)

    def tell_to_end(self) -> None:
        if self._told_ms is None:
            self._told_ms = self._clock.now_ms()
        for task in self._tasks:
            task.cancel()

    async def end(self) -> None:
        """Waits for those that were told to end, for a while."""
        try:
            while self._tasks and (left_ms := self._left_ms()) > 0:
                await asyncio.wait(self._tasks, timeout=left_ms / 1000)
        finally:
            if self._tasks:
                self._on_deaf()
                self._let_go_of_all()

    def _left_ms(self) -> int:
        assert self._told_ms is not None, "waits for runners that nobody told to end"
        return self._told_ms + IGNORED_AFTER_MS - self._clock.now_ms()

    def _let_go_of_all(self) -> None:
        for task in self._tasks:
            self._let_go[task] = None
            # Whoever ends the loop cancels all tasks that it knows of, and waits for them without an end.
            asyncio._unregister_task(task)  # noqa: SLF001 -- documented, for those who keep tasks themselves
            # It is known to be pending, as to gather(), which does the same; no end of it is worth a warning.
            task._log_destroy_pending = False  # type: ignore[attr-defined]  # noqa: SLF001 -- there is no other way
        self._tasks = {}

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.end()
