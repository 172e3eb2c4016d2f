"""Processes that run a plain handler, one call at a time each: what happens to one concerns no other.

A pool of several would fail every call in it when one of its processes dies, whoever killed it. So each slot has a
process of its own, made anew after its death; and a call that is given up is ended with its process, since nothing else
ends it (rules D3, L11). Processes are spawned, never forked.

A process loads the handler once, when it starts, which may take as long as the imports of the handler's module do: that
is no part of any call, and the time limit of a call begins where its process is ready for it.
"""

import asyncio
import contextlib
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable
from concurrent.futures import BrokenExecutor, Future, ProcessPoolExecutor
from contextlib import AbstractAsyncContextManager, nullcontext
from multiprocessing.reduction import ForkingPickler
from typing import Any

from anabranch.errors import ConfigurationError

__all__ = ["Limit", "ProcessSlots"]

Call = Callable[[Callable[..., Any]], Any]
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

    async def run(self, call: Call) -> Any:
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
        if process_id is not None and process_id.done() and not process_id.cancelled():
            with contextlib.suppress(ProcessLookupError, BrokenExecutor):
                os.kill(process_id.result(), _KILL)
        if executor is not None:
            executor.shutdown(wait=False, cancel_futures=True)


class ProcessSlots:
    def __init__(self, count: int, handler: Callable[..., Any]) -> None:
        pickled_handler = _pickled(handler)
        self._slots = [_Slot(pickled_handler) for _ in range(count)]
        # The last one used is used again: what one process can do starts no second.
        self._free: asyncio.LifoQueue[_Slot] = asyncio.LifoQueue()
        for slot in self._slots:
            self._free.put_nowait(slot)

    async def run(self, call: Call, limit: Limit = nullcontext) -> Any:
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


def _call_loaded(call: Call) -> Any:
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
