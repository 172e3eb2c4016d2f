"""Processes that run a plain handler, one call at a time each: what happens to one concerns no other.

A pool of several would fail every call in it when one of its processes dies, whoever killed it. So each slot has a
process of its own, made anew after its death; and a call that is given up is ended with its process, since nothing else
ends it (rules D3, L11). Processes are spawned, never forked.
"""

import asyncio
import contextlib
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable
from concurrent.futures import BrokenExecutor, ProcessPoolExecutor
from typing import Any

__all__ = ["ProcessSlots"]

_KILL = getattr(signal, "SIGKILL", signal.SIGTERM)


class _Slot:
    def __init__(self) -> None:
        self._executor: ProcessPoolExecutor | None = None
        self._start: asyncio.Future[int] | None = None
        self._process_id: int | None = None

    async def run(self, call: Callable[[], Any]) -> Any:
        try:
            executor = await self._started()
            return await asyncio.get_running_loop().run_in_executor(executor, call)
        except BrokenExecutor:
            self._process_id = None  # it is dead: its number may be another's by now
            self.kill()
            raise
        except asyncio.CancelledError:
            if self._process_id is not None:
                self.kill()
            raise

    async def _started(self) -> ProcessPoolExecutor:
        """Giving up a call does not give up the start of its process: the next call finds it started."""
        if self._executor is None:
            context = multiprocessing.get_context("spawn")
            self._executor = ProcessPoolExecutor(1, mp_context=context, initializer=_belong_to_parent)
            self._start = asyncio.get_running_loop().run_in_executor(self._executor, os.getpid)
        if self._start is not None:
            self._process_id = await asyncio.shield(self._start)
            self._start = None
        return self._executor

    def kill(self) -> None:
        """Whatever runs in it ends; the next call gets a new process."""
        executor, self._executor, self._start = self._executor, None, None
        process_id, self._process_id = self._process_id, None
        if process_id is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process_id, _KILL)
        if executor is not None:
            executor.shutdown(wait=False, cancel_futures=True)


class ProcessSlots:
    def __init__(self, count: int) -> None:
        self._slots = [_Slot() for _ in range(count)]
        # The last one used is used again: what one process can do starts no second.
        self._free: asyncio.LifoQueue[_Slot] = asyncio.LifoQueue()
        for slot in self._slots:
            self._free.put_nowait(slot)

    async def run(self, call: Callable[[], Any]) -> Any:
        """Waits for a free process. Cancelling it kills the process that runs the call."""
        slot = await self._free.get()
        try:
            return await slot.run(call)
        finally:
            self._free.put_nowait(slot)

    def close(self) -> None:
        for slot in self._slots:
            slot.kill()


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
