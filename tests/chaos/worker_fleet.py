"""Worker processes that can be killed, stopped and continued, and an audit of everything that they did together.

Every process is ended by its id when the fleet is left, however that happens.
"""

import asyncio
import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

import msgspec
from effects import Effect, EffectsReader
from worker_process import WorkerOptions

from anabranch import Aws
from anabranch._model.leases import LeaseRow
from anabranch.stores.catalogue import find_store
from anabranch.testing import Auditor
from patience import PATIENCE

from stream_world import Credentials

PROGRAM = Path(__file__).with_name("worker_process.py")
LOOK_EVERY_SECONDS = 0.02


class WorkerProcess:
    def __init__(self, name: str, process: asyncio.subprocess.Process) -> None:
        self.name = name
        self.process = process
        self.id = process.pid
        self.stopped = False

    @property
    def is_alive(self) -> bool:
        return self.process.returncode is None

    async def kill(self) -> int:
        """kill -9; when it was dead."""
        self.process.kill()
        await self.process.wait()
        return time.monotonic_ns()

    async def terminate(self) -> int:
        """A clean stop; when it was over."""
        self.process.terminate()
        async with asyncio.timeout(PATIENCE):
            await self.process.wait()
        return time.monotonic_ns()

    def stop(self) -> None:
        self.process.send_signal(signal.SIGSTOP)
        self.stopped = True

    def resume(self) -> None:
        self.process.send_signal(signal.SIGCONT)
        self.stopped = False


class Fleet:
    def __init__(self, options: WorkerOptions, environment: dict[str, str]) -> None:
        self.options = options
        self.workers: list[WorkerProcess] = []
        """All that were ever started, the dead ones included."""
        self.auditor = Auditor()
        self.effects: list[Effect] = []
        """What was seen since `forget` was last called."""
        self.keeps_effects = True
        self._environment = {**os.environ, **environment}
        self._reader = EffectsReader(options.effects_path, options.stream)
        options.events_path.touch()
        self._events_read = 0
        self._events: list[dict[str, Any]] = []

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        for worker in self.alive():
            with suppress(ProcessLookupError):
                await worker.kill()
        self._reader.close()

    def alive(self) -> list[WorkerProcess]:
        return [worker for worker in self.workers if worker.is_alive]

    async def start(
        self,
        count: int = 1,
        *,
        within: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
        **changes: Any,
    ) -> list[WorkerProcess]:
        """Starts workers without waiting until they have joined. `within` is a command that runs another one."""
        options = msgspec.json.encode(msgspec.structs.replace(self.options, **changes)).decode()
        started = []
        for _ in range(count):
            name = f"worker-{len(self.workers)}"
            with Path(self.options.folder, name).open("wb") as output:  # noqa: ASYNC230 -- a moment, at the start
                process = await asyncio.create_subprocess_exec(
                    *within,
                    sys.executable,
                    str(PROGRAM),
                    options,
                    stdout=output,
                    stderr=output,
                    env={**self._environment, **(environment or {})},
                )
            self.workers.append(WorkerProcess(name, process))
            started.append(self.workers[-1])
        return started

    async def join(self, count: int = 1, **changes: Any) -> list[WorkerProcess]:
        """Starts workers and waits until all of them have joined."""
        started = await self.start(count, **changes)
        for worker in started:
            await self.event("ConsumerStarted", worker)
        return started

    # what they did

    def look(self) -> list[Effect]:
        """What was done since the last look; the auditor has seen it too."""
        fresh = list(self._reader.new())
        audit = {"start": self.auditor.start, "finish": self.auditor.finish}
        for effect in fresh:
            audit[effect.kind](effect.record, effect.fence_token)
        if self.keeps_effects:
            self.effects.extend(fresh)
        return fresh

    async def look_at_commits(self) -> list[LeaseRow]:
        """The lease rows as they stand: what they declare finished must not be started again from here on."""
        store = await find_store(self.options.app, self.options.leases_url, {}, Aws(credentials=Credentials()))
        try:
            rows = list(await store.read_leases(with_finished=True))
        finally:
            await store.close()
        self.look()
        for row in rows:
            self.auditor.commit(row)
        return rows

    def events(self, kind: str | None = None, worker: WorkerProcess | None = None) -> list[dict[str, Any]]:
        with self.options.events_path.open("rb") as file:
            file.seek(self._events_read)
            for line in file:
                if not line.endswith(b"\n"):
                    break
                self._events_read += len(line)
                with suppress(msgspec.DecodeError):  # a line that a killed process did not end
                    self._events.append(msgspec.json.decode(line))
        return [
            event
            for event in self._events
            if kind in {None, event["kind"]} and (worker is None or event["process_id"] == worker.id)
        ]

    async def event(self, kind: str, worker: WorkerProcess | None = None) -> dict[str, Any]:
        """Waits for the first event of a kind."""
        await self.until(lambda: bool(self.events(kind, worker)), f"{kind} of {worker and worker.name}")
        return self.events(kind, worker)[0]

    async def until(self, condition: Any, what: str, seconds: float = PATIENCE) -> None:
        """Waits for a condition of the log; a worker that ended in an error ends the wait."""
        deadline = time.monotonic() + seconds
        while True:
            self.look()
            if condition():
                return
            self._check_workers()
            if time.monotonic() > deadline:
                raise TimeoutError(f"waited {seconds:.0f} s for: {what}\n{self._said()}")
            await asyncio.sleep(LOOK_EVERY_SECONDS)

    def _check_workers(self) -> None:
        failed = [worker for worker in self.workers if (worker.process.returncode or 0) > 0]
        assert not failed, f"{failed[0].name} ended with {failed[0].process.returncode}:\n{self._said()}"

    def _said(self) -> str:
        return "\n".join(
            f"--- {worker.name} (process {worker.id}, {worker.process.returncode}):\n"
            + Path(self.options.folder, worker.name).read_text()[-2000:]
            for worker in self.workers
        )
