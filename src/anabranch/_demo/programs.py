"""The demo's processes: started, listened to, killed by their ids."""

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Callable

from anabranch._demo.audit import Handling

__all__ = ["Program"]


class Program:
    """One child process whose output lines are handlings."""

    def __init__(self, name: str, module: str, arguments: list[str], environment: dict[str, str]) -> None:
        self.name = name
        self._command = [sys.executable, "-m", module, *arguments]
        self._environment = environment
        self._process: asyncio.subprocess.Process | None = None
        self.ended = asyncio.Event()
        self.complaints: list[str] = []

    async def run(self, on_handling: Callable[[Handling], None]) -> None:
        """Until the process has ended, however it ends."""
        self._process = process = await asyncio.create_subprocess_exec(
            *self._command,
            env={**os.environ, **self._environment},
            stdin=asyncio.subprocess.PIPE,  # the lifeline
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,  # Ctrl-C is the demo's to handle, and ends its children in order
        )
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._listen(process.stdout, on_handling))
                group.create_task(self._keep_complaints(process.stderr))
            await process.wait()
        finally:
            self.kill()
            await asyncio.shield(process.wait())
            self.ended.set()

    async def _listen(self, lines: asyncio.StreamReader | None, on_handling: Callable[[Handling], None]) -> None:
        assert lines is not None
        async for line in lines:
            words = line.decode().split()
            if len(words) == 5:
                on_handling(Handling(int(words[0]), int(words[1]), *words[2:]))

    async def _keep_complaints(self, lines: asyncio.StreamReader | None) -> None:
        assert lines is not None
        async for line in lines:
            self.complaints = [*self.complaints[-20:], line.decode().rstrip()]

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.returncode is None

    def kill(self) -> None:
        """As `kill -9` does: no goodbye, no last commit."""
        self._signal(signal.SIGKILL)

    def end(self) -> None:
        self._signal(signal.SIGTERM)

    def _signal(self, number: int) -> None:
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(number)
