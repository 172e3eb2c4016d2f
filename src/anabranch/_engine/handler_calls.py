"""How records are handled, as the user said it: in what order, how many at once, decoded how, and what after a failure.

A record is decoded when it is handed out, and again for each attempt. `decode` is None where the value is the data
itself, which then costs nothing. A payload that does not decode will not decode next time either, so it is never
retried: its shard stops there.
"""

import asyncio
import contextlib
import contextvars
import functools
import inspect
import multiprocessing
import os
import queue
import signal
import sys
import threading
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import BrokenExecutor, Future, ProcessPoolExecutor
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from traceback import StackSummary
from types import FrameType
from typing import Any, Final, TypeAlias

from msgspec.structs import replace

from anabranch._engine.clock import SystemClock
from anabranch._engine.session import Session
from anabranch._model.leases import OrderMode
from anabranch._ports import Clock
from anabranch.errors import ConfigurationError
from anabranch.events import HandlerFailed
from anabranch.policies import Retry
from anabranch.records import Context, Record

Decode: TypeAlias = Callable[[Record[bytes]], Record[Any]] | None


class UndecodableError(Exception):
    """A record does not decode; what the decoder raised is its cause."""

    def __init__(self, record: Record[bytes], cause: Exception) -> None:
        super().__init__(f"record {record.position} does not decode")
        self.record = record
        self.cause = cause


class HandlerOptions:
    def __init__(
        self, *, order: OrderMode, concurrency: int, decode: Callable[[bytes], Any] | None, policy: Retry
    ) -> None:
        self.order: OrderMode = order
        self.concurrency = concurrency
        self.policy = policy
        self.decode: Decode = None
        if decode is not None:
            self.decode = _record_decoder(decode)

    def decode_leading(self, records: list[Record[bytes]]) -> tuple[list[Record[Any]], UndecodableError | None]:
        """The records before the first one that does not decode, and the error of that one. The list is a copy: the
        handler may change it.
        """
        decode = self.decode
        if decode is None:
            return records.copy(), None
        decoded: list[Record[Any]] = []
        try:
            for record in records:
                decoded.append(decode(record))  # noqa: PERF401 -- what was decoded before an error counts
        except UndecodableError as error:
            return decoded, error
        return decoded, None


def _record_decoder(decode: Callable[[bytes], Any]) -> Callable[[Record[bytes]], Record[Any]]:
    def decode_record(record: Record[bytes]) -> Record[Any]:
        try:
            return replace(record, value=decode(record.data))
        except Exception as error:
            raise UndecodableError(record, error) from error

    return decode_record


CHARACTERS_MAX: Final = 1_000


def error_text(error: BaseException) -> str:
    name = type(error).__name__
    try:
        text = str(error)
    except Exception:  # noqa: BLE001 -- its text is the user's code, too
        return name
    text = text[:CHARACTERS_MAX].encode("utf-8", "backslashreplace").decode()
    return f"{name}: {text}" if text else name


OnFailed: TypeAlias = Callable[[Session, Record[bytes], str, BaseException | None], None]
"""No further attempt at this record: its shard stops, for this reason and because of this error."""
OnUndecodable: TypeAlias = Callable[[Session, UndecodableError], None]


def failed_attempt(
    session: Session, record: Record[bytes], error: BaseException, *, attempt: int, retry_in_ms: int | None
) -> HandlerFailed:
    return HandlerFailed(
        stream=session.stream.name,
        shard_id=session.shard_id,
        position=str(record.position),
        partition_key=record.partition_key,
        attempt=attempt,
        error=error_text(error),
        retry_in_ms=retry_in_ms,
        exception=error,
    )


_OURS: Final = str(Path(__file__).parent)
_FRAMES_SHOWN: Final = 3

Stack = traceback.StackSummary


def thread_stack(thread_id: int | None) -> Stack:
    frame = sys._current_frames().get(thread_id or 0)  # noqa: SLF001 -- the documented way to another thread
    return _summary(_from_outside(frame))


def task_stack(task: "asyncio.Task[Any] | None") -> Stack:
    return coroutine_stack(None if task is None else task.get_coro())


def coroutine_stack(coroutine: Any) -> Stack:
    """Without frames of the engine before the first of somebody else: they are the same in every call."""
    frames: list[FrameType] = []
    while (frame := _frame_of(coroutine)) is not None:
        frames.append(frame)
        coroutine = getattr(coroutine, "cr_await", None) or getattr(coroutine, "gi_yieldfrom", None)
    return _summary([*frames, *_above(frames[-1])] if frames else [])


def place_in(stack: Stack) -> str:
    """The innermost frames on one line: `handle (app.py:12) > query (db.py:90)`."""
    shown = [f"{frame.name} ({Path(frame.filename).name}:{frame.lineno})" for frame in stack[-_FRAMES_SHOWN:]]
    return " > ".join(shown) or "a place that is not known"


def _frame_of(coroutine: Any) -> FrameType | None:
    frame = getattr(coroutine, "cr_frame", None) or getattr(coroutine, "gi_frame", None)
    return frame if isinstance(frame, FrameType) else None


def _from_outside(frame: FrameType | None) -> list[FrameType]:
    frames: list[FrameType] = []
    while frame is not None:
        frames.append(frame)
        frame = frame.f_back
    return frames[::-1]


def _above(frame: FrameType) -> list[FrameType]:
    """What a coroutine that runs has called: nothing, where it waits."""
    for top in sys._current_frames().values():  # noqa: SLF001 -- the documented way to other threads
        frames = _from_outside(top)
        if frame in frames:
            return frames[frames.index(frame) + 1 :]
    return []


def _summary(frames: list[FrameType]) -> Stack:
    foreign = next((n for n, frame in enumerate(frames) if _is_foreign(frame)), 0)
    return Stack.extract((frame, frame.f_lineno) for frame in frames[foreign:])


def _is_foreign(frame: FrameType) -> bool:
    """Not of the engine, nor of what starts threads for it."""
    name = frame.f_code.co_filename
    return not name.startswith(_OURS) and Path(name).name not in {"threading.py", "thread.py"}


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


ThreadCall = Callable[[], Any]


class HandlerThreads:
    """Used by one event loop; only the queue is shared with the threads."""

    def __init__(self, count_max: int) -> None:
        self._count_max = count_max
        self._queue: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._thread_count = 0
        self._unsettled_count = 0
        """Calls that wait for a thread, or run in one."""
        self._closed = False

    def begin(self, call: ThreadCall) -> asyncio.Future[Any]:
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
        call: ThreadCall,
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


ProcessCall = Callable[[Callable[..., Any]], Any]
"""What a process does with its handler."""
Limit = Callable[[], AbstractAsyncContextManager[None]]

_KILL = getattr(signal, "SIGKILL", signal.SIGTERM)


class _Slot:
    def __init__(self, pickled_handler: bytes) -> None:
        self._pickled_handler = pickled_handler
        self._executor: ProcessPoolExecutor | None = None
        self._process_id: Future[int] | None = None
        """Known before the handler is loaded."""
        self._loading: asyncio.Future[None] | None = None

    async def start(self) -> None:
        """Until the process is ready for a call. Giving up a call does not give up the start of its process: the next
        call finds it started.
        """
        if self._executor is None:
            context = multiprocessing.get_context("spawn")
            executor = ProcessPoolExecutor(1, mp_context=context, initializer=_belong_to_parent)
            self._executor, self._process_id = executor, executor.submit(os.getpid)
            self._loading = asyncio.get_running_loop().run_in_executor(executor, _load, self._pickled_handler)
        if self._loading is None:
            return
        try:
            await asyncio.shield(self._loading)
        except BrokenExecutor as error:
            self._forget()
            raise RuntimeError(
                "a process for the handler ended before it was ready; its standard error says why. A program that is "
                "run as a script must start the consumer under `if __name__ == '__main__':`"
            ) from error
        except Exception:
            self.kill()  # what a module left behind that was loaded by half is of no use to the next attempt
            raise
        self._loading = None

    async def run(self, call: ProcessCall) -> Any:
        """Once started."""
        try:
            return await asyncio.get_running_loop().run_in_executor(self._executor, _call_loaded, call)
        except BrokenExecutor:
            self._forget()
            raise
        except asyncio.CancelledError:
            self.kill()
            raise

    def _forget(self) -> None:
        """The process is dead: its number may be another's by now."""
        self._process_id = None
        self.kill()

    def kill(self) -> None:
        """Whatever runs in it ends; the next call gets a new process."""
        executor, self._executor, self._loading = self._executor, None, None
        process_id, self._process_id = self._process_id, None
        if process_id is not None:
            process_id.add_done_callback(_kill)  # at once, if it is known; a process that just starts says it soon
        if executor is not None:
            executor.shutdown(wait=False, cancel_futures=True)


def _kill(process_id: "Future[int]") -> None:
    if not process_id.cancelled():
        with contextlib.suppress(ProcessLookupError, BrokenExecutor):
            os.kill(process_id.result(), _KILL)


class ProcessSlots:
    def __init__(self, count: int, handler: Callable[..., Any]) -> None:
        pickled_handler = _pickled(handler)
        self._slots = [_Slot(pickled_handler) for _ in range(count)]
        # The last one used is used again: what one process can do starts no second.
        self._free: asyncio.LifoQueue[_Slot] = asyncio.LifoQueue()
        for slot in self._slots:
            self._free.put_nowait(slot)

    async def run(self, call: ProcessCall, limit: Limit = nullcontext) -> Any:
        """Waits for a free process, and then makes the call within the limit. Cancelling it kills the process that runs
        the call.
        """
        slot = await self._free.get()
        try:
            await slot.start()
            async with limit():
                return await slot.run(call)
        finally:
            self._free.put_nowait(slot)

    def close(self) -> None:
        for slot in self._slots:
            slot.kill()


def _pickled(handler: Callable[..., Any]) -> bytes:
    try:
        return bytes(ForkingPickler.dumps(handler))
    except Exception as error:
        raise ConfigurationError(
            f"the handler {handler!r} cannot be sent to another process ({error}): processes= runs functions that a "
            "module defines, by their name"
        ) from error


# in a process of a slot

_LOADED: list[Callable[..., Any]] = []
"""The handler, once it is loaded."""


def _load(pickled_handler: bytes) -> None:
    try:
        _LOADED.append(ForkingPickler.loads(pickled_handler))
    except BaseException as error:  # an error of a module's own might not be understood in the parent
        text = f"the handler could not be loaded in a new process: {type(error).__name__}: {error}"
        raise RuntimeError(text) from error


def _call_loaded(call: ProcessCall) -> Any:
    return call(_LOADED[0])


def _belong_to_parent() -> None:
    """In a new process. Signals that are sent to a whole group of processes are for its parent to obey, which lets this
    one finish its call; and with its parent it ends, also by `kill -9`: nobody would ever end it after that.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: None)  # not SIG_IGN, which programs that a handler starts would inherit
    threading.Thread(target=_end_with_parent, name="anabranch-parent", daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


END_POLL_SECONDS = 0.1
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
        self.concurrency_max = processes or None
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
                await asyncio.wait([pending], timeout=END_POLL_SECONDS)
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


async def clear_cancellation(task: "asyncio.Task[Any]", is_ending: Callable[[], bool]) -> None:
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
