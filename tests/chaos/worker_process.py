"""One worker as a program of its own: consumes a stream, logs every effect and every event, and ends on SIGTERM.

    python worker_process.py '{"stream": "orders", "app": "billing", ...}'

Records may command the handler, so that a test decides which worker misbehaves and when: `block 30` keeps the event
loop from turning. Only the first worker that gets a command obeys it: the next owner of its shard just handles it.
"""

import asyncio
import ctypes
import os
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
from effects import EffectsLog

from anabranch import Consumer, ConsumerSettings, LeaseSettings, Record
from anabranch.records import Context

DIE_WITH_PARENT = 1


class WorkerOptions(msgspec.Struct, frozen=True, kw_only=True):
    stream: str
    app: str
    folder: str
    """Effects, events and, unless `leases` says otherwise, leases are kept here."""
    order: str = "shard"
    concurrency: int = 32
    handling_seconds: float = 0.0
    stall_limit: float = 120.0
    expiry: float = 10.0
    leases: str = ""
    """The URL of the lease store; a file in the folder without it."""

    @property
    def leases_url(self) -> str:
        return self.leases or f"sqlite:///{Path(self.folder, 'leases.sqlite')}"

    @property
    def effects_path(self) -> Path:
        return Path(self.folder, "effects")

    @property
    def events_path(self) -> Path:
        return Path(self.folder, "events")


class EventLog:
    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def note(self, kind: str, **details: Any) -> None:
        line = {"kind": kind, "process_id": os.getpid(), "at_ns": time.monotonic_ns(), **details}
        os.write(self._file, msgspec.json.encode(line) + b"\n")


def obey(record: Record[bytes], folder: str) -> None:
    command, _, seconds = record.data.decode().partition(" ")
    with suppress(FileExistsError):
        Path(folder, f"obeyed-{record.sequence_number}").touch(exist_ok=False)
        assert command == "block"
        time.sleep(float(seconds))


async def main(options: WorkerOptions) -> None:
    effects, events = EffectsLog(options.effects_path), EventLog(options.events_path)
    consumer: Consumer[bytes] = Consumer(
        options.stream,
        app=options.app,
        leases=options.leases_url,
        order=options.order,
        concurrency=options.concurrency,
        settings=ConsumerSettings(leases=LeaseSettings(stall_limit=options.stall_limit, expiry=options.expiry)),
        on_event=lambda event: events.note(type(event).__name__, **msgspec.to_builtins(event)),
    )

    async def handle(record: Record[bytes], context: Context) -> None:
        effects.note("start", record, context.fence_token)
        if options.handling_seconds:
            await asyncio.sleep(options.handling_seconds)
        if not record.data[:1].isdigit():
            obey(record, options.folder)
        effects.note("finish", record, context.fence_token)

    events.note("Booted")
    report = await consumer.run(handle)
    events.note("Ended", clean=report.clean, leftover_count=len(report.leftovers))


if __name__ == "__main__":
    ctypes.CDLL(None).prctl(DIE_WITH_PARENT, signal.SIGKILL)
    asyncio.run(main(msgspec.json.decode(sys.argv[1], type=WorkerOptions)))
