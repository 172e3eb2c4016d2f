"""A record that kills its process, with real processes and a SQLite file; the rest of it is simulated."""

import asyncio
import subprocess
import sys
from collections import Counter

import pytest

from anabranch.stores.catalogue import find_store

from stream_world import run, stream_world

PROGRAM = """
import asyncio, os, sys
from anabranch import Aws, Consumer
from anabranch.errors import ShardStoppedError
from stream_world import QUICK, Credentials

endpoint, leases, effects, life = sys.argv[1:]
effects = os.open(effects, os.O_WRONLY | os.O_APPEND)
aws = Aws(region="us-east-1", endpoint_url=endpoint, credentials=Credentials())
options = {"app": "billing", "leases": f"sqlite:///{leases}", "until": "tip"}
consumer = Consumer("orders", aws=aws, settings=QUICK, **options)

async def handle(record):
    if record.data == b"poison":
        os._exit(9)
    await asyncio.sleep(0)
    os.write(effects, f"{life} {record.shard_id} {record.data.decode()}\\n".encode())

try:
    asyncio.run(consumer.run(handle, handle_signals=False))
except ShardStoppedError:
    sys.exit(3)
"""
STOPPED = 3

SHARDS, RECORDS = 3, 40
SUSPECT_LIFE = 3
"""The first life in which the shard is a suspect."""


def _write(world, before=30):
    """As many records to each shard, and among those of the first one that kills; that shard's name."""
    first, *_ = shards = sorted(world.open_shards(), key=lambda shard: shard["ShardId"])
    for shard in shards:
        where = {"PartitionKey": "p", "ExplicitHashKey": shard["HashKeyRange"]["StartingHashKey"]}
        for number in range(RECORDS):
            if shard is first and number == before:
                world.call("PutRecord", Data=b"poison", **where)
            world.call("PutRecord", Data=str(number).encode(), **where)
    return first["ShardId"]


async def _live(*arguments, deaths_max=12):
    """Runs of a worker, one after another, until one ends by itself; how many died."""
    for deaths in range(deaths_max):
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", PROGRAM, *map(str, arguments), str(deaths + 1),
            env={"PYTHONPATH": ":".join(sys.path)}, stderr=subprocess.PIPE,
        )  # fmt: skip
        _, stderr = await process.communicate()
        if process.returncode in {0, STOPPED}:
            return deaths
        assert process.returncode == 9, stderr.decode()
    raise AssertionError("it dies forever")


@pytest.mark.long
@pytest.mark.timeout(90)
def test_a_record_that_kills_processes_is_named_in_the_end_and_no_other_shard_loses_progress(tmp_path):
    leases, effects = tmp_path / "leases.db", tmp_path / "effects"
    effects.touch()

    async def main():
        async with stream_world(SHARDS) as world:
            poisoned = _write(world, before=30)
            deaths = await _live(world.kinesis.endpoint_url, leases, effects)
            assert 5 <= deaths <= 8
            store = await find_store("billing", f"sqlite://{leases}", {})
            rows = {row.key.shard_id: row for row in await store.read_leases()}
            await store.close()
        stopped = [shard_id for shard_id, row in rows.items() if row.stopped is not None]
        assert stopped == [poisoned]
        assert rows[stopped[0]].stopped.partition_key == "p"
        assert rows[stopped[0]].stopped.reason.owner_count == 5
        _check_effects(effects.read_text().splitlines(), stopped[0], before=30)

    run(main)


def _check_effects(lines, poisoned, before):
    seen, late = Counter(), Counter()
    for line in lines:
        life, shard_id, number = line.split()
        seen[shard_id, int(number)] += 1
        late[shard_id, int(number)] += int(life) >= SUSPECT_LIFE
    shards = {shard_id for shard_id, _ in seen} - {poisoned}
    assert len(shards) == SHARDS - 1
    assert all(seen[shard_id, number] for shard_id in shards for number in range(RECORDS))
    assert {number for shard_id, number in seen if shard_id == poisoned} == set(range(before))
    assert max(late.values()) == 1, "a death took progress with it"
