"""Calls a user's handler: async handlers on the loop, plain functions in threads or processes.

Also here: decoding, time limits, the text and the event of a failed call, and where in the code a running call is.
Other modules decide which record comes next.
"""

import asyncio
import contextlib
import contextvars
import functools
import inspect
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import BrokenExecutor, Future, ProcessPoolExecutor
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from dataclasses import dataclass, field
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from traceback import StackSummary, walk_stack
from types import FrameType
from typing import Any, Final

from msgspec.structs import replace

from anabranch._core.handling.failures import UndecodableError, error_text
from anabranch._core.session import Session
from anabranch._daemon_threads import DaemonThreads
from anabranch._engine.clock import SystemClock
from anabranch._model.leases import OrderMode
from anabranch._ports import Clock
from anabranch.errors import ConfigurationError, UsageError
from anabranch.events import HandlerFailed
from anabranch.policies import Retry
from anabranch.reasons import TimeoutIgnored
from anabranch.records import Context, Record


class HandlerOptions:
    """How the user wants records handled. A record is decoded for each attempt, unless its value is its data (`decode`
    is None). A payload that does not decode is never retried.
    """

    def __init__(
        self, *, order: OrderMode, concurrency: int, decode: Callable[[bytes], Any] | None, policy: Retry
    ) -> None:
        self.order: OrderMode = order
        self.concurrency = concurrency
        self.policy = policy
        self.decode_value = decode
        """As the user gave it."""
        self.decode = None if decode is None else _record_decoder(decode)

    def decode_leading(self, records: list[Record[bytes]]) -> tuple[list[Record[Any]], UndecodableError | None]:
        """The records before the first that does not decode, and its error. A handler may change the list."""
        decode = self.decode
        if decode is None:
            return records.copy(), None
        decoded: list[Record[Any]] = []
        try:
            for record in records:
                decoded.append(decode(record))  # noqa: PERF401 -- keeps what was decoded before an error
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


def failed_attempt(
    session: Session,
    record: Record[bytes],
    error: BaseException,
    *,
    attempt: int,
    retry_in_ms: int | None,
    record_count: int = 1,
) -> HandlerFailed:
    return HandlerFailed(
        **session.names,
        position=str(record.position),
        partition_key=record.partition_key,
        attempt=attempt,
        record_count=record_count,
        error=error_text(error),
        retry_in_ms=retry_in_ms,
        exception=error,
    )


_OURS: Final = str(Path(__file__).parent)
_FRAMES_SHOWN: Final = 3


# Where in the code a call is, for diagnosis only: unknown parts are omitted. A waiting coroutine has no stack, so we
# follow what each one awaits; a running one is found in the stack of its thread.


def thread_stack(thread_id: int | None) -> StackSummary:
    frame = sys._current_frames().get(thread_id or 0)  # noqa: SLF001 -- the documented way to see another thread
    return _summary([] if frame is None else _from_outside(frame))


def task_stack(task: "asyncio.Task[Any] | None") -> StackSummary:
    return coroutine_stack(None if task is None else task.get_coro())


def coroutine_stack(coroutine: Any) -> StackSummary:
    """Without our own frames at the start: they are the same in every call."""
    frames: list[FrameType] = []
    while (frame := _frame_of(coroutine)) is not None:
        frames.append(frame)
        coroutine = getattr(coroutine, "cr_await", None) or getattr(coroutine, "gi_yieldfrom", None)
    return _summary([*frames, *_above(frames[-1])] if frames else [])


def describe_stack(stack: StackSummary) -> str | None:
    """The innermost frames on one line: `handle (app.py:12) > query (db.py:90)`. None if they are unknown."""
    shown = [f"{frame.name} ({Path(frame.filename).name}:{frame.lineno})" for frame in stack[-_FRAMES_SHOWN:]]
    return " > ".join(shown) or None


def _frame_of(coroutine: Any) -> FrameType | None:
    frame = getattr(coroutine, "cr_frame", None) or getattr(coroutine, "gi_frame", None)
    return frame if isinstance(frame, FrameType) else None


def _from_outside(frame: FrameType) -> list[FrameType]:
    return [each for each, _ in walk_stack(frame)][::-1]


def _above(frame: FrameType) -> list[FrameType]:
    """The frames that a running coroutine has called; none if it waits."""
    for top in sys._current_frames().values():  # noqa: SLF001 -- the documented way to see other threads
        frames = _from_outside(top)
        if frame in frames:
            return frames[frames.index(frame) + 1 :]
    return []


def _summary(frames: list[FrameType]) -> StackSummary:
    foreign = next((n for n, frame in enumerate(frames) if _is_foreign(frame)), 0)
    return StackSummary.extract((frame, frame.f_lineno) for frame in frames[foreign:])


def _is_foreign(frame: FrameType) -> bool:
    """Whether the frame is neither ours nor of the threading module."""
    name = frame.f_code.co_filename
    return not name.startswith(_OURS) and Path(name).name not in {"threading.py", "_daemon_threads.py"}


IGNORED_AFTER_MS: Final = 1_000
"""How long a call may take to end after its timeout before we report that it ignores the timeout."""


@dataclass(eq=False, repr=False)
class TimeLimit:
    """The handler timeout. At the timeout a call is stopped: an async call is cancelled, a process is killed.
    Its record is retried only after the call has ended (rule D3). So a call that continues, in a thread or despite its
    cancellation, blocks its key or shard; it is reported with its place in the code.
    """

    _clock: Clock
    seconds: float | None
    """None: no limit."""
    _due_ms: dict[asyncio.Task[Any], int] = field(default_factory=dict)

    @asynccontextmanager
    async def of_call(self) -> AsyncIterator[None]:
        """Wraps the call that this task makes. Raises TimeoutError if its time is up."""
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
        """Whether the call of this task still runs long after its timeout."""
        due_ms = self._due_ms.get(task)
        return due_ms is not None and now_ms >= due_ms + IGNORED_AFTER_MS

    def reason(self, record: Record[Any], stack: StackSummary) -> TimeoutIgnored:
        return TimeoutIgnored(
            position=str(record.position),
            partition_key=record.partition_key,
            timeout=self.seconds or 0.0,
            at=describe_stack(stack),
        )


ProcessCall = Callable[[Callable[..., Any]], Any]
"""Runs in the process, with the loaded handler."""
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
        """Waits until the process is ready. Cancelling this does not cancel the start: the next call can use it."""
        if self._executor is None:
            context = multiprocessing.get_context("spawn")
            executor = ProcessPoolExecutor(1, mp_context=context, initializer=_init_handler_process)
            self._executor, self._process_id = executor, executor.submit(os.getpid)
            self._loading = asyncio.get_running_loop().run_in_executor(executor, _load, self._pickled_handler)
        if self._loading is None:
            return
        try:
            await asyncio.shield(self._loading)
        except BrokenExecutor as error:
            self._forget()
            raise RuntimeError(
                "a handler process exited while starting; see its standard error. A program that is "
                "run as a script must start the consumer under `if __name__ == '__main__':`"
            ) from error
        except Exception:
            self.kill()  # a half-loaded module is of no use to the next attempt
            raise
        self._loading = None

    async def run(self, call: ProcessCall) -> Any:
        """Needs `start` first."""
        try:
            return await asyncio.get_running_loop().run_in_executor(self._executor, _call_loaded, call)
        except BrokenExecutor:
            self._forget()
            raise
        except asyncio.CancelledError:
            self.kill()
            raise

    def _forget(self) -> None:
        """The process is dead, and another process may already have its id."""
        self._process_id = None
        self.kill()

    def kill(self) -> None:
        """Ends whatever runs in the process; the next call gets a new one."""
        executor, self._executor, self._loading = self._executor, None, None
        process_id, self._process_id = self._process_id, None
        if process_id is not None:
            process_id.add_done_callback(_kill)  # now, or as soon as a process that is starting reports its id
        if executor is not None:
            executor.shutdown(wait=False, cancel_futures=True)


def _kill(process_id: "Future[int]") -> None:
    if not process_id.cancelled():
        with contextlib.suppress(ProcessLookupError, BrokenExecutor):
            os.kill(process_id.result(), _KILL)


class ProcessSlots:
    def __init__(self, count: int, handler: Callable[..., Any]) -> None:
        # A new handler process imports the main module first. A consumer that starts there would join the application,
        # and could skip records because it cannot start processes. Python's own check comes with the first process.
        if getattr(multiprocessing.current_process(), "_inheriting", False):
            raise UsageError(
                "this is a handler process, which imports the main module: start the consumer there only under "
                "`if __name__ == '__main__':`"
            )
        pickled_handler = _pickled(handler)
        self._slots = [_Slot(pickled_handler) for _ in range(count)]
        # Reuses the last process first, so no more are started than needed.
        self._free: asyncio.LifoQueue[_Slot] = asyncio.LifoQueue()
        for slot in self._slots:
            self._free.put_nowait(slot)

    async def run(self, call: ProcessCall, limit: Limit = nullcontext) -> Any:
        """Waits for a free process, then makes the call within the limit. Cancelling it kills that process."""
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
            f"the handler {handler!r} cannot be sent to another process ({error}): processes= needs a function defined "
            "at the top level of a module"
        ) from error


# in a process of a slot

_LOADED: list[Callable[..., Any]] = []
"""The handler, once loaded."""


def _load(pickled_handler: bytes) -> None:
    try:
        _LOADED.append(ForkingPickler.loads(pickled_handler))
    except BaseException as error:  # the parent may be unable to unpickle it
        text = f"the handler could not be loaded in a new process: {type(error).__name__}: {error}"
        raise RuntimeError(text) from error


def _call_loaded(call: ProcessCall) -> Any:
    return call(_LOADED[0])


def _init_handler_process() -> None:
    """Initializes a handler process. It ignores signals sent to the whole process group: the parent handles them and
    lets calls finish. It exits with its parent, even after `kill -9` of the parent.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: None)  # not SIG_IGN: programs started by the handler would inherit it
    threading.Thread(target=_exit_with_parent, name="anabranch-parent", daemon=True).start()


def _exit_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


END_POLL_SECONDS = 0.1
"""How often a cancelled call in a thread checks whether everything has been closed."""


class NotStarted(Exception):  # noqa: N818 -- an outcome, passed out of a pool
    """The call was not made, because the lease may have expired while it waited in a queue."""


class HandlerCall:
    """Calls one handler with a record or a batch.

    Threads and processes have a queue between the fence check and the call, so the fence is checked again where the
    call starts (rule L8). A call that is too late is not made. Processes compare the same boot-time clock.
    """

    def __init__(self, handler: Callable[..., Any], *, threads: int, processes: int = 0) -> None:
        if not callable(handler):
            raise ConfigurationError(f"a handler must be a function that takes a record, not {handler!r}")
        self._handler = handler
        called = (handler, getattr(handler, "__call__", None))  # noqa: B004 -- an object may have one of its own
        if any(inspect.isgeneratorfunction(each) or inspect.isasyncgenfunction(each) for each in called):
            raise ConfigurationError(
                f"the handler {handler!r} has a yield in it, so calling it runs nothing. A handler returns when its "
                "record is handled"
            )
        self.is_async = any(map(inspect.iscoroutinefunction, called))
        if processes and self.is_async:
            raise ConfigurationError(
                "processes= needs a plain function, but this handler is async. Make it a plain function, or leave out "
                "processes="
            )
        self._passes_context = _takes_context(handler)
        self.wants_context = bool(processes) or self._passes_context
        """Whether a call needs a Context: the handler takes one, or a process needs the fence time."""
        self.direct: Callable[[Any], Awaitable[Any]] | None = (
            handler if self.is_async and not self.wants_context else None
        )
        """The handler itself, if it needs only the record."""
        self.is_cancellable = self.is_async or bool(processes)
        """Whether a running call can be ended; one in a thread cannot."""
        self.process_count = processes
        """If not 0: how many calls can run at once. Each times itself, without the wait for its process."""
        self._processes = ProcessSlots(processes, handler) if processes else None
        self._threads = None if self.is_cancellable else DaemonThreads(threads, "anabranch-handler")
        self._thread_ids: dict[asyncio.Task[Any] | None, int] = {}
        """The thread that runs the call of each task."""
        self.is_given_up = False
        """Whether calls that still run are not waited for any more."""

    async def __call__(
        self, item: Any, context: Context | None, may_start: Callable[[], bool], limit: Limit = nullcontext
    ) -> Any:
        arguments = (item, context) if self._passes_context else (item,)
        if self._processes is not None:
            fenced_at_ms = None if context is None else context.fenced_at_ms
            reported = await self._processes.run(functools.partial(_call_before, fenced_at_ms, arguments), limit)
            if context is not None:
                context.metrics.extend(reported)
            return None
        if self._threads is None:
            result = await self._handler(*arguments)
            if result is not None:
                refuse_unfinished(result)
            return result
        return await self._call_in_thread(
            self._threads, functools.partial(_call_if, may_start, self._handler, arguments)
        )

    async def _call_in_thread(self, threads: DaemonThreads, call: Callable[[], Any]) -> Any:
        task, thread_ids = asyncio.current_task(), self._thread_ids

        def call_here() -> Any:
            thread_ids[task] = threading.get_ident()
            return call()

        pending = asyncio.wrap_future(threads.submit(contextvars.copy_context().run, call_here))
        try:
            result = await asyncio.shield(pending)
        except asyncio.CancelledError:
            # Threads cannot be cancelled: the record must not be retried while the call runs (rule D3).
            while not (pending.done() or self.is_given_up):
                await asyncio.wait([pending], timeout=END_POLL_SECONDS)
            raise
        finally:
            thread_ids.pop(task, None)
        if result is not None:
            refuse_unfinished(result)
        return result

    def stack(self, task: "asyncio.Task[Any]", coroutine: Any = None) -> StackSummary:
        """Where in the code this task's call is now. Pass the coroutine if the task does not await it directly."""
        if self._processes is not None:
            return StackSummary()  # it cannot be seen from here
        if self._threads is not None:
            return thread_stack(self._thread_ids.get(task))
        return coroutine_stack(task.get_coro() if coroutine is None else coroutine)

    @property
    def runs_in_this_thread(self) -> bool:
        """Whether the caller runs inside a handler call in a thread."""
        return threading.get_ident() in tuple(self._thread_ids.values())

    def give_up(self) -> None:
        """Stops waiting for calls that still run."""
        self.is_given_up = True

    def close(self) -> None:
        self.is_given_up = True
        if self._processes is not None:
            self._processes.close()
        if self._threads is not None:
            self._threads.shutdown(cancel_futures=True)


async def clear_cancellation(task: "asyncio.Task[Any]", is_ending: Callable[[], bool]) -> None:
    """Undoes a cancellation that a call left on its task, pending or caught. Ends the task if the worker ends."""
    if not is_ending():
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(0)
        while task.cancelling():
            task.uncancel()
    if is_ending():
        raise asyncio.CancelledError


def _takes_context(handler: Callable[..., Any]) -> bool:
    """Whether the handler has a second positional parameter, with or without a default."""
    try:
        parameters = inspect.signature(handler).parameters.values()
    except (TypeError, ValueError):
        return False  # a built-in without a signature
    positional = [p for p in parameters if p.kind in {p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD}]
    required = [p for p in positional if p.default is p.empty]
    if not positional and not any(p.kind == p.VAR_POSITIONAL for p in parameters):
        raise ConfigurationError("a handler must take the record as its first parameter; this one takes none")
    if len(required) > 2:
        raise ConfigurationError(
            f"a handler takes a record and optionally a Context; this one needs {len(required)} parameters"
        )
    if unset := [p.name for p in parameters if p.kind == p.KEYWORD_ONLY and p.default is p.empty]:
        raise ConfigurationError(
            f"a handler is called with a record and optionally a Context: {', '.join(map(repr, unset))} has no "
            "value. Give it a default, or pass functools.partial(handler, name=value)"
        )
    return len(positional) >= 2


def refuse_unfinished(result: Any) -> None:
    """Rejects a result that still has to be awaited or iterated: the record would count as handled too early."""
    if not (inspect.isawaitable(result) or inspect.isgenerator(result) or inspect.isasyncgen(result)):
        return
    if inspect.iscoroutine(result):
        result.close()
    raise ConfigurationError(
        f"the handler returned a {type(result).__name__}, so nothing was handled: make it an async def that awaits "
        "what it calls, or a plain function without yield"
    )


def _call_if(may_start: Callable[[], bool], handler: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    if not may_start():
        raise NotStarted
    return _call(handler, arguments)


def _call_before(
    fenced_at_ms: int | None, arguments: tuple[Any, ...], handler: Callable[..., Any]
) -> list[tuple[str, float]]:
    """Returns what the handler reported with `context.metric`."""
    if fenced_at_ms is not None and SystemClock().now_ms() >= fenced_at_ms:
        raise NotStarted
    try:
        refuse_unfinished(_call(handler, arguments))  # the result itself may not be picklable
    except (SystemExit, KeyboardInterrupt) as error:  # they would end the worker
        raise RuntimeError(f"the handler raised {type(error).__name__}({error})") from error
    except Exception as error:
        sent = _sendable(error)
        if sent is error:
            raise
        raise sent from error
    return arguments[1].metrics if len(arguments) > 1 else []


def _sendable(error: Exception) -> Exception:
    """The error, or an object that the parent unpickles as this error. An error that it cannot unpickle would look like
    a dead process, and `give_up_on` would not match it.
    """
    for sent in (error, _RebuiltInParent(error)):
        with contextlib.suppress(Exception):
            ForkingPickler.loads(ForkingPickler.dumps(sent))
            return sent
    return RuntimeError(f"the handler raised {error_text(error)}")


class _RebuiltInParent(Exception):  # noqa: N818 -- never seen
    """Pickles an error by its arguments and attributes, without its `__init__`, which may take other arguments."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self._error = error

    def __reduce__(self) -> tuple[Callable[..., Exception], tuple[Any, ...]]:
        return _rebuilt, (type(self._error), self._error.args, self._error.__dict__)


def _rebuilt(kind: type[Exception], arguments: tuple[Any, ...], attributes: dict[str, Any]) -> Exception:
    error = kind.__new__(kind, *arguments)
    error.__dict__.update(attributes)
    return error


def _call(handler: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    try:
        return handler(*arguments)
    except StopIteration as error:  # a future cannot hold it and would never be done
        raise RuntimeError("the handler raised StopIteration") from error
