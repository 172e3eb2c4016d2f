"""Calling a user's handler: asynchronous ones directly, plain functions in a thread or in a process of a pool.

A pool has a queue between the look at the fence and the start of the call, so the fence is looked at again
where the call starts (rule L8): a call that comes too late is not made, and its record is given back. Processes
compare the same boot-time clock.
"""

import asyncio
import contextlib
import functools
import inspect
import threading
import traceback
from collections.abc import Awaitable, Callable
from contextlib import nullcontext
from typing import Any

from anabranch._engine.handling.handler_threads import HandlerThreads
from anabranch._engine.handling.process_slots import Limit, ProcessSlots
from anabranch._engine.handling.stacks import coroutine_stack, thread_stack
from anabranch._engine.system_clock import SystemClock
from anabranch.errors import ConfigurationError
from anabranch.records import Context

__all__ = ["HandlerCall", "NotStarted", "take_back_cancellation"]


ENDED_LOOK_SECONDS = 0.1
"""Between two looks whether a call in a thread has ended, or everything has: nothing tells a task of the second."""


class NotStarted(Exception):  # noqa: N818 -- an outcome that travels out of a pool
    """The lease may have lapsed while the call waited in the pool's queue: it was not made."""


class HandlerCall:
    """One handler, ready to be called with a record or a batch."""

    def __init__(self, handler: Callable[..., Any], *, threads: int, processes: int = 0) -> None:
        if not callable(handler):
            raise ConfigurationError(f"a handler is a function of a record, not {handler!r}")
        self._handler = handler
        called = (handler, getattr(handler, "__call__", None))  # noqa: B004 -- an object may have one of its own
        if any(inspect.isgeneratorfunction(each) or inspect.isasyncgenfunction(each) for each in called):
            raise ConfigurationError(
                f"the handler {handler!r} has a yield in it, so that calling it would run nothing of it: "
                "a handler returns when its record is handled"
            )
        self.is_async = any(map(inspect.iscoroutinefunction, called))
        if processes and self.is_async:
            raise ConfigurationError(
                "processes= runs plain functions; this handler is asynchronous. Make it a plain function, or leave "
                "processes= out: asynchronous handlers share the event loop."
            )
        self.wants_context = bool(processes) or _takes_context(handler)
        """Whether a call needs a Context: the handler takes one, or a process needs the fence's time from it."""
        self._passes_context = self.wants_context and not processes
        self.direct: Callable[[Any], Awaitable[Any]] | None = (
            handler if self.is_async and not self.wants_context else None
        )
        """The handler itself, where a call of it needs no more than the record."""
        if processes and _takes_context(handler):
            raise ConfigurationError("a handler that runs in processes= takes the record alone, without a Context")
        self.is_cancellable = self.is_async or bool(processes)
        """Whether a call that runs can be made to end; one in a thread cannot."""
        self.at_once_max = processes or None
        """Calls that can run at a time, if not any number: one more would use up its time-out waiting for a process."""
        self._processes = ProcessSlots(processes, handler) if processes else None
        self.times_itself = bool(processes)
        """Whether a call sees to its time limit itself: in a process it begins where that is ready for it."""
        self._threads = None if self.is_cancellable else HandlerThreads(threads)
        self._thread_ids: dict[asyncio.Task[Any] | None, int] = {}
        """Which thread works for which task."""
        self._closed = False

    async def __call__(
        self, item: Any, context: Context | None, may_start: Callable[[], bool], limit: Limit = nullcontext
    ) -> Any:
        arguments = (item, context) if self._passes_context else (item,)
        if self._processes is not None:
            fenced_at_ms = None if context is None else context.fenced_at_ms
            return await self._processes.run(functools.partial(_call_before, fenced_at_ms, arguments), limit)
        if self._threads is None:
            result = await self._handler(*arguments)
            if result is not None:
                refuse_unfinished(result)
            return result
        return await self._call_in_thread(
            self._threads, functools.partial(_call_if, may_start, self._handler, arguments)
        )

    async def _call_in_thread(self, threads: HandlerThreads, call: Callable[[], Any]) -> Any:
        task, thread_ids = asyncio.current_task(), self._thread_ids

        def call_here() -> Any:
            thread_ids[task] = threading.get_ident()
            return call()

        pending = threads.begin(call_here)
        try:
            result = await asyncio.shield(pending)
        except asyncio.CancelledError:
            # A thread cannot be cancelled: its record must not be tried again beside it (rule D3).
            while not (pending.done() or self._closed):
                await asyncio.wait([pending], timeout=ENDED_LOOK_SECONDS)
            raise
        finally:
            thread_ids.pop(task, None)
        if result is not None:
            refuse_unfinished(result)
        return result

    def stack(self, task: "asyncio.Task[Any]", coroutine: Any = None) -> traceback.StackSummary:
        """Where the call that this task makes stands now; of an asynchronous handler, where that coroutine does, if it
        is not awaited in the usual way. What runs in another process cannot be seen.
        """
        if self._processes is not None:
            return traceback.StackSummary()
        if self._threads is not None:
            return thread_stack(self._thread_ids.get(task))
        return coroutine_stack(task.get_coro() if coroutine is None else coroutine)

    @property
    def runs_in_this_thread(self) -> bool:
        """Whether the caller is a handler call in a thread."""
        return threading.get_ident() in tuple(self._thread_ids.values())

    @property
    def is_given_up(self) -> bool:
        return self._closed

    def give_up(self) -> None:
        """Calls that still run in the pool are not waited for any more."""
        self._closed = True

    def close(self) -> None:
        self._closed = True
        if self._processes is not None:
            self._processes.close()
        if self._threads is not None:
            self._threads.close()


async def take_back_cancellation(task: "asyncio.Task[Any]", is_ending: Callable[[], bool]) -> None:
    """After a call: what it has done to the task that it ran in is not meant for the next one. That may be a
    cancellation of its own that is still to come, or the count of one that it caught. Only if everything ends, the
    task does.
    """
    if not is_ending():
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(0)
        while task.cancelling():
            task.uncancel()
    if is_ending():
        raise asyncio.CancelledError


def _takes_context(handler: Callable[..., Any]) -> bool:
    """Whether a second argument has a place: whoever gives it a default has named it all the same, to be called without
    one by others.
    """
    try:
        parameters = inspect.signature(handler).parameters.values()
    except (TypeError, ValueError):
        return False  # a built-in without a signature
    positional = [p for p in parameters if p.kind in {p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD}]
    required = [p for p in positional if p.default is p.empty]
    if not positional and not any(p.kind == p.VAR_POSITIONAL for p in parameters):
        raise ConfigurationError("a handler takes the record as its first parameter; this one takes none")
    if len(required) > 2:
        raise ConfigurationError(
            f"a handler takes a record, and a Context if it wants one; this one needs {len(required)} parameters"
        )
    if unset := [p.name for p in parameters if p.kind == p.KEYWORD_ONLY and p.default is p.empty]:
        raise ConfigurationError(
            f"a handler is called with a record, and a Context if it wants one: {', '.join(map(repr, unset))} has no "
            "value; give it a default, or pass functools.partial(handler, name=value)"
        )
    return len(positional) >= 2


def refuse_unfinished(result: Any) -> None:
    """What a handler returned must not be work that nobody has done yet: its record would count as handled."""
    if not (inspect.isawaitable(result) or inspect.isgenerator(result) or inspect.isasyncgen(result)):
        return
    if inspect.iscoroutine(result):
        result.close()
    raise ConfigurationError(
        f"the handler returned a {type(result).__name__}, so that nothing was handled: make it an async def that "
        "awaits what it calls, or a plain function that has no yield"
    )


def _call_if(may_start: Callable[[], bool], handler: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    if not may_start():
        raise NotStarted
    return _call(handler, arguments)


def _call_before(fenced_at_ms: int | None, arguments: tuple[Any, ...], handler: Callable[..., Any]) -> None:
    if fenced_at_ms is not None and SystemClock().now_ms() >= fenced_at_ms:
        raise NotStarted
    try:
        refuse_unfinished(_call(handler, arguments))  # the result itself may not get out of the process
    except (SystemExit, KeyboardInterrupt) as error:  # sent on as they are, they would end the worker
        raise RuntimeError(f"the handler raised {type(error).__name__}({error})") from error


def _call(handler: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    try:
        return handler(*arguments)
    except StopIteration as error:  # as from next() of nothing: a future cannot hold it, and would never be done
        raise RuntimeError("the handler raised StopIteration") from error
