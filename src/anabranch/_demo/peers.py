"""The alternatives that run beside our workers: two loops over botocore, and async-kinesis if it is installed.

Run as `python -m anabranch._demo.peers NAME STREAM CHECKPOINTS`. Each prints a line for each record that it handled.
None of them was weakened for the demo. Each is one process, as such programs usually are.
"""

import asyncio
import json
import os
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from botocore.exceptions import ClientError
from botocore.session import get_session

from anabranch._engine.tasks import on_parent_exit

STDOUT: Final = 1
LOOK_FOR_SHARDS_EVERY_SECONDS: Final = 10
POLL_EVERY_SECONDS: Final = 0.2


def plain_loop(stream: str, _: Path) -> None:
    """The loop that people write first: list the shards, read each from the tip, look for new shards now and then.
    It keeps no position and ignores lineage.
    """
    kinesis = get_session().create_client("kinesis")
    iterators: dict[str, str | None] = {}  # None: read to the end
    list_at = 0.0
    while True:
        if time.monotonic() >= list_at:
            list_at = time.monotonic() + LOOK_FOR_SHARDS_EVERY_SECONDS
            for shard_id in (shard["ShardId"] for shard in kinesis.list_shards(StreamName=stream)["Shards"]):
                if shard_id not in iterators:
                    answer = kinesis.get_shard_iterator(StreamName=stream, ShardId=shard_id, ShardIteratorType="LATEST")
                    iterators[shard_id] = answer["ShardIterator"]
        for shard_id, iterator in iterators.items():
            if iterator is None:
                continue
            try:
                answer = kinesis.get_records(ShardIterator=iterator, Limit=1000)
            except ClientError:
                continue
            for record in answer["Records"]:
                handle(record["Data"], "plain")
            iterators[shard_id] = answer.get("NextShardIterator")
        time.sleep(POLL_EVERY_SECONDS)


class Checkpoints:
    """Positions in a file: a sequence number, `@` with a time, "" for the beginning of a shard, or DONE."""

    DONE: Final = "done"

    def __init__(self, path: Path) -> None:
        self._path = path
        self.positions: dict[str, str] = json.loads(path.read_text()) if path.exists() else {}

    def save(self, positions: dict[str, str]) -> None:
        self.positions |= positions
        written = self._path.with_suffix(".new")
        written.write_text(json.dumps(self.positions))
        written.replace(self._path)


def careful_loop(stream: str, path: Path) -> None:
    """Saves its position after each page, and reads a child shard after all its parents."""
    kinesis = get_session().create_client("kinesis")
    checkpoints = Checkpoints(path)
    if not checkpoints.positions:
        shards = kinesis.list_shards(StreamName=stream)["Shards"]
        checkpoints.save({shard["ShardId"]: f"@{time.time()}" for shard in shards})
    iterators: dict[str, str] = {}
    while True:
        for shard_id, position in list(checkpoints.positions.items()):
            if position == Checkpoints.DONE:
                continue
            try:
                iterator = iterators.get(shard_id) or _iterator(kinesis, stream, shard_id, position)
                answer = kinesis.get_records(ShardIterator=iterator, Limit=1000)
            except ClientError:
                iterators.pop(shard_id, None)
                continue
            for record in answer["Records"]:
                handle(record["Data"], "careful")
            if answer["Records"]:
                checkpoints.save({shard_id: answer["Records"][-1]["SequenceNumber"]})
            if "NextShardIterator" in answer:
                iterators[shard_id] = answer["NextShardIterator"]
                continue
            done = {shard for shard, position in checkpoints.positions.items() if position == Checkpoints.DONE}
            ready = [child for child in answer["ChildShards"] if {*child["ParentShards"]} <= {*done, shard_id}]
            checkpoints.save({shard_id: Checkpoints.DONE} | {child["ShardId"]: "" for child in ready})
        time.sleep(POLL_EVERY_SECONDS)


def _iterator(kinesis: Any, stream: str, shard_id: str, position: str) -> str:
    start: dict[str, Any]
    if position.startswith("@"):
        start = {"ShardIteratorType": "AT_TIMESTAMP", "Timestamp": datetime.fromtimestamp(float(position[1:]), UTC)}
    elif position:
        start = {"ShardIteratorType": "AFTER_SEQUENCE_NUMBER", "StartingSequenceNumber": position}
    else:
        start = {"ShardIteratorType": "TRIM_HORIZON"}
    answer: dict[str, str] = kinesis.get_shard_iterator(StreamName=stream, ShardId=shard_id, **start)
    return answer["ShardIterator"]


def async_kinesis(stream: str, path: Path) -> None:
    """The consumer of that library. Its checkpointer also writes the positions to a file, so a restart keeps them."""
    kinesis, checkpointers, processors = (
        import_module(name) for name in ("kinesis", "kinesis.checkpointers", "kinesis.processors")
    )
    checkpoints = Checkpoints(path)
    memory: Any = checkpointers.MemoryCheckPointer

    class FileCheckPointer(memory):  # type: ignore[misc]
        async def allocate(self, shard_id: str) -> tuple[bool, str | None]:
            allocated, sequence = await super().allocate(shard_id)
            return allocated, sequence or checkpoints.positions.get(shard_id)

        async def checkpoint(self, shard_id: str, sequence: str) -> None:
            await super().checkpoint(shard_id, sequence)
            checkpoints.save({shard_id: sequence})

    async def consume() -> None:
        async with kinesis.Consumer(
            stream,
            endpoint_url=os.environ["AWS_ENDPOINT_URL_KINESIS"],
            region_name=os.environ["AWS_REGION"],
            iterator_type="TRIM_HORIZON",  # LATEST would lose the first records of new shards
            processor=processors.StringProcessor(),
            checkpointer=FileCheckPointer(name="demo"),
            sleep_time_no_records=POLL_EVERY_SECONDS,
            record_limit=1000,
            shard_fetch_rate=5,
        ) as consumer:
            while True:  # its iterator ends when no record has arrived for a while
                async for data in consumer:
                    handle(data, "async-kinesis")

    asyncio.run(consume())


def handle(data: bytes | str, name: str) -> None:
    text = data if isinstance(data, str) else data.decode()
    os.write(STDOUT, f"{time.monotonic_ns()} {text} {name}\n".encode())


PEERS: Final[dict[str, Callable[[str, Path], None]]] = {
    "plain": plain_loop,
    "careful": careful_loop,
    "async-kinesis": async_kinesis,
}
"""By the name that the audit shows."""


def peer_names() -> list[str]:
    return [name for name in PEERS if name != "async-kinesis" or find_spec("kinesis") is not None]


if __name__ == "__main__":
    on_parent_exit(sys.stdin.fileno(), lambda: os._exit(1))  # a pipe that ends with the demo
    PEERS[sys.argv[1]](sys.argv[2], Path(sys.argv[3]))
