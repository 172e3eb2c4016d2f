"""Counts the instructions of fixed runs, so that a regression shows on a loaded machine too: `make guard`.

Times on a shared machine are noise; the instructions that valgrind's callgrind counts are not. Each run happens in
virtual time, without sockets, threads or randomness: prepared bodies go in, and the decoder, the engine and the loop
that consumes are counted from the first read to the last record; of a producer, from the first put to the last result.
A count is compared with that of a fixed loop of plain Python in the same interpreter, the yardstick: another patch
version or another compiler changes both (3.11.2 of Debian and a plain build of 3.11.7 differ by 2 %, for polls by 7 %).
`instructions.json` has the accepted counts in yardsticks, for each minor version of Python. A run that needs more than
`TOLERANCE` above them fails. `--write` stores new counts.
"""

import asyncio
import ctypes
import json
import mmap
import os
import platform
import random
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
BASELINE = HERE / "instructions.json"
TOLERANCE = 0.08
YARDSTICK_STEPS = 20_000
RECORDS = 4_000
POLLS = 5_000
IDLE_SHARDS = 500
LATENCY_SECONDS = 0.006


class Counter:
    """Turns the counting on and off, by the requests that valgrind recognises in the code that it runs."""

    # rax = the request's arguments, rdx = the default result; four rotations that cancel out; xchg rbx, rbx
    _CODE = bytes.fromhex("4889f8 31d2 48c1c703 48c1c70d 48c1c73d 48c1c733 4887db 4889d0 c3")
    _START, _STOP = 0x43540004, 0x43540005

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, len(self._CODE), prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
        self._memory.write(self._CODE)
        address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        self._request = ctypes.CFUNCTYPE(ctypes.c_ulong, ctypes.c_void_p)(address)
        self._started = False

    def start(self) -> None:
        if not self._started:
            self._started = True
            self._ask(self._START)

    def stop(self) -> None:
        self._ask(self._STOP)

    def _ask(self, request: int) -> None:
        self._request(ctypes.byref((ctypes.c_ulong * 6)(request)))


# the runs: each returns how many units it did


def yardstick(counter: Counter) -> int:
    """What the engine's code is made of: calls, attributes, small lists, dicts and integers."""

    class Shape:
        __slots__ = ("count", "names")

        def __init__(self) -> None:
            self.count = 0
            self.names: dict[int, list[int]] = {}

        def add(self, number: int) -> int:
            self.count += number & 3
            self.names[number & 255] = [number, self.count]
            return len(self.names)

    shape, total = Shape(), 0
    counter.start()
    for number in range(YARDSTICK_STEPS):
        total += shape.add(number)
    counter.stop()
    return YARDSTICK_STEPS


def consume(shape: str, mode: str):
    """`shape` as in the names of canned streams: records, or aggregates of records, and their bytes."""

    def run(counter: Counter) -> int:
        from anabranch._core.handling.batches import BatchLimits
        from anabranch._engine.consumer_run import EngineMode
        from anabranch._engine.handler_calls import HandlerCall
        from anabranch.testing import loop as simulation

        stream = VirtualStream(f"{'aggregated' if shape.count('x') == 2 else 'plain'}-2s-2p-{shape}", counter)
        left = RECORDS

        def finished(count: int) -> bool:
            nonlocal left
            left -= count
            if not left:
                counter.stop()
            return not left

        async def main() -> None:
            over = asyncio.get_running_loop().create_future()

            async def handle(record) -> None:
                record.data, record.partition_key  # noqa: B018 -- what a reader does at least
                if finished(1):
                    over.set_result(None)

            if mode == "async for":
                run = stream.consumer(EngineMode())
                async for record in run.records():
                    record.data, record.partition_key  # noqa: B018
                    if finished(1):
                        break
            elif mode == "batches":
                run = stream.consumer(EngineMode(batches=BatchLimits(500, 1 << 20, 10)))
                async for batch in run.batches():
                    for record in batch:
                        record.data, record.partition_key  # noqa: B018
                    if finished(len(batch)):
                        break
            else:
                run = stream.consumer(EngineMode(HandlerCall(handle, threads=1)), order=mode)
                await run.start()
                await over
            await run.stop(5)

        simulation.run(main)
        return RECORDS

    return run


def idle_poll(counter: Counter) -> int:
    from anabranch._core.handling.batches import BatchLimits
    from anabranch._core.reading.pace import PaceLimits
    from anabranch._engine.consumer_run import EngineMode
    from anabranch.testing import loop as simulation

    stream = VirtualStream(f"plain-{IDLE_SHARDS}s-0p-0x0", counter, latency=LATENCY_SECONDS, first_read=8 * IDLE_SHARDS)

    async def main() -> int:
        run = stream.consumer(EngineMode(batches=BatchLimits()), pace=PaceLimits(idle_interval_ms=200))
        await run.start()
        while stream.reads < 8 * IDLE_SHARDS + POLLS:  # noqa: ASYNC110 -- virtual time
            await asyncio.sleep(0.05)
        counter.stop()
        reads = stream.reads - 8 * IDLE_SHARDS
        await run.stop(5)
        return reads

    return simulation.run(main)


def produce(counter: Counter) -> int:
    from anabranch.producer import Producer, ProducerPorts
    from anabranch.testing import loop as simulation

    class VirtualProducer(Producer):
        def _open_ports(self) -> ProducerPorts:
            return ProducerPorts(stream, stream.clock, random.Random(1))

    stream = VirtualStream("plain-4s-0p-0x0", counter)
    keys = [f"user-{number:011}" for number in range(500)]

    async def main() -> None:
        async with VirtualProducer("orders") as producer:
            await producer.put_and_wait(b"warm", "up")
            counter.start()
            deliveries = []
            for start in range(0, RECORDS, 500):
                deliveries += [producer.put_nowait(b"x" * 100, keys[(start + n) % 500]) for n in range(500)]
                await asyncio.sleep(0)
            for delivery in deliveries:
                assert (await delivery).delivered
            counter.stop()

    simulation.run(main)
    return RECORDS


class VirtualStream:
    """A canned stream without sockets: what the client would encode and decode is encoded and decoded here."""

    def __init__(self, name: str, counter: Counter, *, latency: float = 0.0, first_read: int = 0) -> None:
        sys.path.insert(0, str(HERE / "servers"))
        import canned_stream

        import scale

        self._canned = canned_stream
        self._counter = counter
        self._latency = latency
        self._first_read = first_read
        self._pages: dict[str, bytes] = {}
        self.name = name
        self.clock = scale.VirtualClock()
        self.reads = 0
        self._shard_count = int(name.split("-")[1][:-1])
        for number in range(self._shard_count):
            for page in range(int(name.split("-")[2][:-1])):
                iterator = canned_stream._iterator(name.encode(), number, page).decode()
                self._pages[iterator] = self._body("GetRecords", iterator)

    def consumer(self, mode, order="shard", *, pace=None):
        import scale
        from anabranch._ports import Ports
        from anabranch.stores.memory import MemoryLeaseStore

        ports = Ports(
            kinesis=self, store=MemoryLeaseStore(), clock=self.clock, entropy=random.Random(1), emit=lambda _: None
        )
        return scale.run_with(ports, self.name, mode, order, pace=pace or scale.NO_PACE)

    def _body(self, operation: str, text: str) -> bytes:
        body = self._canned.answer(operation.encode(), text.encode())
        assert body is not None
        return body

    # the port

    async def get_shard_iterator(self, stream, shard_id, position):  # noqa: ARG002
        return self._canned._iterator(stream.name.encode(), int(shard_id.rpartition("-")[2]), 0).decode()

    async def get_records(self, stream, shard_iterator, *, limit=None, has_room=None):  # noqa: ARG002
        from anabranch._wire import bodies

        if self.reads >= self._first_read:
            self._counter.start()
        self.reads += 1
        bodies.encode_get_records(stream, shard_iterator, limit=limit)
        if shard_iterator not in self._pages:
            self._pages[shard_iterator] = self._body("GetRecords", shard_iterator)
        body = self._pages[shard_iterator]
        if self._latency:
            await asyncio.sleep(self._latency)
        return bodies.decode_get_records(body, server_seconds=self.clock.wall_ms() / 1000)

    async def list_shards(self, stream, *, shard_filter=None, next_token=None):  # noqa: ARG002
        from anabranch._wire import bodies

        return bodies.decode_list_shards(self._body("ListShards", self.name))

    async def describe_stream_summary(self, stream):  # noqa: ARG002
        from anabranch._wire import bodies

        body = self._body("DescribeStreamSummary", self.name)
        return bodies.decode_describe_stream_summary(body, server_seconds=self.clock.wall_ms() / 1000)

    async def put_records(self, stream, entries):
        from anabranch._wire import bodies

        for piece in bodies.encode_put_records(stream, entries):
            assert piece
        await asyncio.sleep(0.005)
        found = [
            {"SequenceNumber": f"{self.reads + n:056}", "ShardId": self._owner(entry)}
            for n, entry in enumerate(entries)
        ]
        self.reads += len(entries)
        return bodies.decode_put_records(json.dumps({"FailedRecordCount": 0, "Records": found}).encode())

    def _owner(self, entry) -> str:
        from anabranch._model.hash_keys import md5_hash_key

        number = md5_hash_key(entry.partition_key) * self._shard_count >> 128
        return f"shardId-{number:012}"


RUNS = {
    "yardstick": yardstick,
    "idle poll": idle_poll,
    "100 B, async for": consume("1000x100", "async for"),
    "100 B, batches": consume("1000x100", "batches"),
    '100 B, run, order="shard"': consume("1000x100", "shard"),
    '100 B, run, order="key"': consume("1000x100", "key"),
    "100 B aggregated, async for": consume("10x100x100", "async for"),
    "100 B aggregated, batches": consume("10x100x100", "batches"),
    "100 B, put and awaited": produce,
}


def count(name: str) -> float:
    """Instructions for each unit of one run, in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        command = [
            "valgrind", "--tool=callgrind", "--instr-atstart=no", f"--callgrind-out-file={folder}/out",
            sys.executable, __file__, "--child", name,
        ]  # fmt: skip
        environment = {**os.environ, "PYTHONHASHSEED": "0"}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    collected = re.search(r"Collected : (\d+)", done.stderr)
    if done.returncode or collected is None:
        raise SystemExit(f"{name}: the run failed\n{done.stderr[-4000:]}")
    return int(collected[1]) / int(done.stdout)


def main() -> int:
    if sys.argv[1:2] == ["--child"]:
        print(RUNS[sys.argv[2]](Counter()))
        return 0
    if shutil.which("valgrind") is None or platform.machine() != "x86_64":
        print("not counted: this needs valgrind (make services) on x86-64", file=sys.stderr)
        return int(os.environ.get("CI") == "true")
    chosen = [name for name in sys.argv[1:] if not name.startswith("--")] or [
        name for name in RUNS if name != "yardstick"
    ]
    unit, version = count("yardstick"), ".".join(platform.python_version_tuple()[:2])
    baseline = json.loads(BASELINE.read_text()) if BASELINE.exists() else {}
    known = baseline.setdefault(version, {})
    is_compared = bool(known) or "--write" in sys.argv
    print(f"{'instructions':32}{'a unit':>10}{'yardsticks':>12}{'known':>10}")
    slower = []
    for name in chosen:
        instructions, before = count(name), known.get(name)
        found = round(instructions / unit, 2)
        print(f"  {name:30}{instructions:10.0f}{found:12.2f}{before or '':>10}", flush=True)
        if "--write" in sys.argv:
            known[name] = found
        elif before is not None and found > before * (1 + TOLERANCE):
            slower.append(f"{name}: {found} yardsticks, {found / before - 1:.0%} more than {before}")
    if "--write" in sys.argv:
        BASELINE.write_text(json.dumps(baseline, indent=2) + "\n")
    if not is_compared:
        others = ", ".join(one for one in baseline if baseline[one])
        print(
            f"NOT GUARDED: nothing was compared, because {BASELINE.name} has counts of Python {others}, not {version}",
            file=sys.stderr,
        )
    if slower:
        print("more instructions than before:\n  " + "\n  ".join(slower), file=sys.stderr)
        print("if that is meant, `python benchmarks/instructions.py --write` stores the new counts", file=sys.stderr)
    return int(bool(slower))


if __name__ == "__main__":
    sys.exit(main())
