"""The one background task of a consumer or producer: started by whoever first needs it, awaited by whoever closes it.

Everything else runs in task groups inside it, so that nothing binds to the caller's task: an object may be opened in
one task and closed in another. Only here and for runners of a handler (RunnerTasks) is a task made outside a group, and
this one is never let go of.
"""

import asyncio
from collections.abc import Coroutine
from typing import Any

__all__ = ["Host", "begin", "single_cause"]


class Host:
    def __init__(self) -> None:
        self._task: asyncio.Task[None] | None = None

    def start(self, work: Coroutine[Any, Any, None], name: str) -> None:
        assert self._task is None, "started twice"
        self._task = asyncio.get_running_loop().create_task(work, name=name)

    @property
    def is_started(self) -> bool:
        return self._task is not None

    @property
    def is_running(self) -> bool:
        return self._task is not None and not self._task.done()

    @property
    def error(self) -> BaseException | None:
        """Why the work ended, if it ended in an error: the single cause, not the group around it."""
        task = self._task
        if task is None or not task.done() or task.cancelled():
            return None
        return single_cause(task.exception())

    async def wait(self) -> None:
        """Until the work has ended, however it ends; cancelling the waiter does not cancel the work."""
        if self._task is not None and not self._task.done():
            await asyncio.wait([self._task])

    async def cancel(self) -> None:
        if self._task is not None and not self._task.done():
            self._task.cancel()
            await asyncio.wait([self._task])


def single_cause(error: BaseException | None) -> BaseException | None:
    """The first error of a group, with the others as its notes: groups are ours, and are not shown to users."""
    while isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
        error = error.exceptions[0]
    if isinstance(error, BaseExceptionGroup):
        first, *others = error.exceptions
        for other in others:
            first.add_note(f"also: {other!r}")
        return single_cause(first)
    return error


def begin(group: asyncio.TaskGroup, work: Coroutine[Any, Any, None], name: str) -> bool:
    """A task of the group. Where that is going down, for whatever reason, nothing more is begun, and that is no error
    of who asked. Says whether it was.
    """
    try:
        group.create_task(work, name=name)
    except RuntimeError:
        work.close()
        return False
    return True
