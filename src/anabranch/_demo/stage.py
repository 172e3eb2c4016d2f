"""The demo's set-up: a local Kinesis, a producer, three worker processes, the alternatives, and the events."""

import asyncio
import contextlib
import os
import random
import secrets
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any, Final, Literal, NamedTuple

import msgspec

from anabranch._demo.audit import HandledRecord, PutRecord
from anabranch._demo.peers import peer_names
from anabranch._engine.writing.writer import Delivery
from anabranch._model.leases import AppRow, LeaseRow
from anabranch.config import Aws
from anabranch.errors import AnabranchError
from anabranch.local import LocalKinesis
from anabranch.local.errors import LocalError
from anabranch.local.state.stream import Stream
from anabranch.producer import Producer
from anabranch.stores.sqlite import SqliteLeaseStore

Action = Literal["split", "kill", "merge", "throttle"]

STORY: Final[tuple[tuple[float, Action], ...]] = (
    (0.14, "split"),
    (0.30, "kill"),
    (0.46, "merge"),
    (0.58, "throttle"),
    (0.70, "split"),
    (0.80, "merge"),
)
"""As fractions of the writing time."""

KEYS: Final[dict[str, Action]] = {"s": "split", "m": "merge", "k": "kill", "t": "throttle"}


class Program:
    """One child process. Each line of its output is a record that it handled."""

    def __init__(self, name: str, module: str, arguments: list[str], environment: dict[str, str]) -> None:
        self.name = name
        self._command = [sys.executable, "-m", module, *arguments]
        self._environment = environment
        self._process: asyncio.subprocess.Process | None = None
        self.ended = asyncio.Event()
        self.error_lines: list[str] = []

    async def run(self, on_handled: Callable[[HandledRecord], None]) -> None:
        """Returns when the process has ended."""
        self._process = process = await asyncio.create_subprocess_exec(
            *self._command,
            env={**os.environ, **self._environment},
            stdin=asyncio.subprocess.PIPE,  # closes when the demo ends
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,  # the demo handles Ctrl-C and stops its children
        )
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._listen(process.stdout, on_handled))
                group.create_task(self._keep_errors(process.stderr))
            await process.wait()
        finally:
            self.kill()
            await asyncio.shield(process.wait())
            self.ended.set()

    async def _listen(self, lines: asyncio.StreamReader | None, on_handled: Callable[[HandledRecord], None]) -> None:
        assert lines is not None
        async for line in lines:
            words = line.decode().split()
            if len(words) == 3:
                on_handled(HandledRecord(int(words[0]), int(words[1]), words[2]))

    async def _keep_errors(self, lines: asyncio.StreamReader | None) -> None:
        assert lines is not None
        async for line in lines:
            self.error_lines = [*self.error_lines[-20:], line.decode().rstrip()]

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.returncode is None

    def kill(self, number: int = signal.SIGKILL) -> None:
        """By default with SIGKILL: no clean-up, no last commit."""
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(number)


APP: Final = "demo"
STREAM: Final = "orders"
SHARDS: Final = 4
WORKERS: Final = ("one", "two", "three")
KEY_COUNT: Final = 48
FIRST_RECORDS_SECONDS: Final = 60.0
PAUSE_SECONDS_MAX: Final = 3.0
PAUSE_SHARE: Final = 1 / 12


class DemoEvent(msgspec.Struct, frozen=True):
    """An event of the story, or one that a key press caused."""

    at_ns: int
    text: str
    mark: str
    """A short form of the text, for the margin of the river."""
    label: str = ""
    """The text for the audit."""
    shard_ids: tuple[str, ...] = ()
    """Shards that the audit watches: how soon were they read after this event?"""
    killed_worker: str | None = None


class ShardView(msgspec.Struct, frozen=True):
    shard_id: str
    start: int
    end: int
    owner: str | None
    is_open: bool


class RiverRow(NamedTuple):
    """Who reads which part of the hash space at one moment."""

    seconds: float
    shards: tuple[ShardView, ...]
    marks: tuple[str, ...]
    """The events since the previous row, each in a word or two."""


class Stage:
    def __init__(
        self, group: asyncio.TaskGroup, *, seed: int, seconds: float, records_per_second: int, fanout: bool = False
    ) -> None:
        self._group = group
        self._random = random.Random(seed)  # noqa: S311 -- a seed, not a secret
        """Only the story uses it, so that a seed repeats the story at any speed."""
        self._seconds = seconds
        self._pause_seconds = min(PAUSE_SECONDS_MAX, PAUSE_SHARE * seconds)
        """How long killed programs stay down, and how long the service throttles. Both end before the next event of the
        story, so that short runs have the same events in the same order.
        """
        self._rate = records_per_second
        self._read = "fanout" if fanout else "polling"
        self._kinesis = LocalKinesis(create={STREAM: SHARDS}, seed=seed)
        self._folder = TemporaryDirectory(prefix="anabranch-demo-")
        self.put: dict[int, PutRecord] = {}
        self.ours: list[HandledRecord] = []
        self.peers: dict[str, list[HandledRecord]] = {name: [] for name in peer_names()}
        self.events: list[DemoEvent] = []
        self.shards: list[ShardView] = []
        self._programs: dict[str, Program] = {}
        self._store = SqliteLeaseStore(Path(self._folder.name) / "leases.db", APP)

    # starting

    async def open(self) -> None:
        await self._kinesis.start()
        await self._store.open(
            AppRow(app=APP, app_id=secrets.token_hex(16), created_wall_ms=time.time_ns() // 1_000_000)
        )
        self._start_programs(*WORKERS, *self.peers)

    def _start_programs(self, *names: str) -> None:
        for name in names:
            if name in self.peers:
                module, handled = "anabranch._demo.peers", self.peers[name]
                arguments = [name, STREAM, f"{self._folder.name}/{name}.json"]
            else:
                module, handled = "anabranch._demo.worker", self.ours
                arguments = [name, STREAM, f"sqlite:///{self._store.path}", self._read]
            program = Program(name, module, arguments, self._kinesis.environment())
            self._programs[name] = program
            self._group.create_task(program.run(handled.append), name=f"program {name}")

    async def await_readers(self) -> None:
        """Waits until each shard has an owner and each alternative has handled a record. The audit ignores records
        handled before that.
        """
        deadline = time.monotonic() + FIRST_RECORDS_SECONDS
        async with self._producer() as producer:
            while not (self.shards and all(shard.owner for shard in self.shards) and all(self.peers.values())):
                self._check_programs()
                if time.monotonic() > deadline:
                    silent = [name for name, handled in self.peers.items() if not handled] or ["the workers"]
                    late = " and ".join(silent)
                    raise AnabranchError(f"{late} did not begin to read within {FIRST_RECORDS_SECONDS:.0f} s")
                for number in range(KEY_COUNT):
                    await producer.put(b"-1", f"customer-{number}")
                await asyncio.sleep(0.3)
                await self.look()
        for handlings in (self.ours, *self.peers.values()):
            handlings.clear()

    def _producer(self) -> Producer[bytes]:
        """Aggregation is off: plain loops cannot read aggregates."""
        aws = Aws(
            region=self._kinesis.region,
            endpoint_url=self._kinesis.endpoint_url,
            credentials=SimpleNamespace(access_key="local", secret_key="local", token=None),  # noqa: S106 -- any will do
        )
        return Producer(STREAM, aggregate=None, aws=aws)

    def _check_programs(self) -> None:
        for program in self._programs.values():
            if program.ended.is_set():
                raise AnabranchError(f"the program {program.name} ended: {' '.join(program.error_lines[-3:])}")

    # writing

    async def write(self) -> None:
        """Writes numbered records at a steady rate; a record counts as put once it is delivered."""
        started = time.monotonic()
        number = 0
        async with self._producer() as producer, asyncio.TaskGroup() as group:
            try:
                while (elapsed := time.monotonic() - started) < self._seconds:
                    while number < elapsed * self._rate:
                        key = f"customer-{number * 29 % KEY_COUNT}"
                        delivery = await producer.put(str(number).encode(), key)
                        group.create_task(self._note_put(number, key, delivery))
                        number += 1
                    await asyncio.sleep(0.02)
            finally:
                self._kinesis.faults.clear()  # otherwise the end of the demo would wait for the throttling

    async def _note_put(self, number: int, key: str, delivery: Delivery) -> None:
        result = await delivery
        if result.shard_id is not None:
            self.put[number] = PutRecord(key, result.shard_id)

    # faults

    def perform(self, action: Action) -> None:
        actions = {"split": self._split, "merge": self._merge, "kill": self._kill, "throttle": self._throttle}
        actions[action]()

    def _split(self) -> None:
        shard = max(self._stream.routing.open_shards, key=lambda one: (one.hash_key_range.size, -one.index))
        start, end = shard.hash_key_range
        if self._reshard("SplitShard", ShardToSplit=shard.shard_id, NewStartingHashKey=str((start + end) // 2)):
            text, mark = f"split shard {shard.index}", f"split {shard.index}"
            self._note(text, mark, label="a split", shard_ids=shard.child_ids)

    def _merge(self) -> None:
        shards = self._stream.routing.open_shards
        if len(shards) < 2:
            return
        at = self._random.randrange(len(shards) - 1)
        low, high = shards[at : at + 2]
        if self._reshard("MergeShards", ShardToMerge=low.shard_id, AdjacentShardToMerge=high.shard_id):
            text, mark = f"merged shard {low.index} and shard {high.index}", f"merged {low.index} + {high.index}"
            self._note(text, mark, label="a merge", shard_ids=low.child_ids)

    def _reshard(self, operation: str, **request: str) -> bool:
        now_ms = time.time_ns() // 1_000_000
        try:
            self._kinesis.state.call(operation, {"StreamName": STREAM, **request}, now_ms=now_ms)
        except LocalError as error:
            self._note(f"{operation} could not be done: {error}", "refused")
            return False
        return True

    def _kill(self) -> None:
        """Kills one worker and the alternatives with SIGKILL; all restart a little later."""
        victim = self._random.choice(WORKERS)
        if not self._programs[victim].is_running:
            return
        orphans = tuple(shard.shard_id for shard in self.shards if shard.owner == victim and shard.is_open)
        for name in (victim, *self.peers):
            self._programs[name].kill()
        self._note(
            f"killed worker {victim} and the alternatives (kill -9)",
            f"killed {victim}",
            label="kill -9",
            shard_ids=orphans,
            killed_worker=victim,
        )
        self._group.create_task(self._restart(victim))

    async def _restart(self, name: str) -> None:
        await asyncio.sleep(self._pause_seconds)
        self._start_programs(name, *self.peers)
        self._note(f"started worker {name} and the alternatives again", f"started {name}")

    def _throttle(self) -> None:
        rules = [self._kinesis.faults.on(operation).throttle() for operation in ("GetRecords", "PutRecords")]
        self._note(f"throttled every read and write for {self._pause_seconds:.2g} s", "throttled")
        loop = asyncio.get_running_loop()
        for rule in rules:
            loop.call_later(self._pause_seconds, self._kinesis.faults.remove, rule)

    def _note(self, text: str, mark: str, **more: Any) -> None:
        self.events.append(DemoEvent(time.monotonic_ns(), text, mark, **more))

    # looking

    async def look(self) -> None:
        """Reads the owner of each shard from the lease store."""
        leases = await self._store.read_leases(with_finished=True)
        members = {row.member_id: row for row in (await self._store.poll()).members}
        owners = {row.key.shard_id: _owner(row, members) for row in leases if not row.is_finished}
        finished = {row.key.shard_id for row in leases if row.is_finished}
        self.shards = [
            ShardView(shard.shard_id, *shard.hash_key_range, owners.get(shard.shard_id), shard.is_open)
            for shard in self._stream.shards.values()
            if shard.shard_id not in finished
        ]

    @property
    def _stream(self) -> Stream:
        return self._kinesis.state.account.streams[STREAM]

    @property
    def handled_count(self) -> int:
        return len({handling.number for handling in self.ours if handling.number in self.put})

    # ending

    def end(self) -> None:
        """Stops all processes; their task group waits for them."""
        for program in self._programs.values():
            program.kill(signal.SIGTERM)

    async def close(self) -> None:
        for program in self._programs.values():
            program.kill()
        await self._store.close()
        await self._kinesis.stop()
        self._folder.cleanup()


def _owner(row: LeaseRow, members: dict[str, Any]) -> str | None:
    member = members.get(row.owner or "")
    return member.worker_id if member is not None and member.state == "live" else None
