"""Several worker processes as one program: started together, stopped together, never started again in silence.

They share an application's leases, and balance its shards among them. A worker that fails is named; the others take
over its shards and go on, and when all have ended the exit code is that of the first failure. Signals go to the workers
through here alone: the first stops them in order, the second hurries them, the third kills them. Should this process
be gone without a word, their lifeline ends, and they stop in order by themselves.
"""

import asyncio
import contextlib
import os
import signal
from collections.abc import Sequence
from typing import Final

from anabranch._cli.output import counted, say

__all__ = ["run_workers"]

_STOPPING: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_ENDED_BEFORE_IT_BEGAN: Final = {-signal.SIGTERM, 128 + signal.SIGINT}
_KILL_AT: Final = 3


async def run_workers(command: Sequence[str], count: int) -> int:
    """The exit code."""
    lifeline, held_here = os.pipe()
    workers = _Workers(lifeline)
    loop = asyncio.get_running_loop()
    for number in _STOPPING:
        loop.add_signal_handler(number, workers.on_signal)
    try:
        for _ in range(count):
            await workers.start(command)
        say(f"{counted(count, 'worker')}: processes {', '.join(str(pid) for pid in workers.process_ids)}")
        await workers.wait()
    finally:
        for number in _STOPPING:
            loop.remove_signal_handler(number)
        await workers.kill()
        os.close(lifeline)
        os.close(held_here)
    return workers.code


def _the_others(count: int) -> str:
    return "the other one" if count == 1 else f"the other {count}"


class _Workers:
    def __init__(self, lifeline: int) -> None:
        self.code = 0
        self._lifeline = lifeline
        self._processes: list[asyncio.subprocess.Process] = []
        self._signal_count = 0
        self._stopping = False

    @property
    def process_ids(self) -> list[int]:
        return [process.pid for process in self._processes]

    async def start(self, command: Sequence[str]) -> None:
        if self._stopping:
            return
        self._processes.append(
            await asyncio.create_subprocess_exec(
                *command,
                "--lifeline",
                str(self._lifeline),
                pass_fds=(self._lifeline,),
                stdin=asyncio.subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C comes to us alone, and is passed on
            )
        )

    async def wait(self) -> None:
        async with asyncio.TaskGroup() as group:
            for process in self._processes:
                group.create_task(self._watch(process))

    async def _watch(self, process: asyncio.subprocess.Process) -> None:
        code = await process.wait()
        if not code or (self._stopping and code in _ENDED_BEFORE_IT_BEGAN):
            return
        exit_code = code if code > 0 else 128 - code  # as a shell reports what a signal ended
        self.code = self.code or exit_code
        how = f"exit code {code}" if code > 0 else signal.Signals(-code).name
        left = sum(other.returncode is None for other in self._processes)
        rest = f": its shards go to {_the_others(left)}" if left and not self._stopping else ""
        say(f"worker process {process.pid} ended with {how}{rest}")

    def on_signal(self) -> None:
        self._signal_count += 1
        self._stop(signal.SIGKILL if self._signal_count >= _KILL_AT else signal.SIGTERM)

    def _stop(self, number: signal.Signals) -> None:
        self._stopping = True
        for process in self._processes:
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    process.send_signal(number)

    async def kill(self) -> None:
        """What still runs although nobody waits for it."""
        self._stop(signal.SIGKILL)
        for process in self._processes:
            await process.wait()
