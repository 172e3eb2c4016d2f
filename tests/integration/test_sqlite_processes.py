"""One SQLite file, several operating-system processes: they agree, and what one acknowledged outlives its kill -9."""

import asyncio
import json
import signal
import subprocess
import sys

import pytest

from anabranch._model.leases import AppRow, LeaseKey, LeaseRow
from anabranch.stores import SqliteLeaseStore
from patience import PATIENCE

PROCESSES = 4
LEASES = 12
COMMITS = 10

PREAMBLE = """
import asyncio, json, sys
from msgspec.structs import replace
from anabranch._model.leases import AppRow, HeartbeatWrite, Checkpoint, Conflict, LeaseKey, LeaseRow, MemberRow
from anabranch._model.streams import Position
from anabranch.errors import LeaseStoreError
from anabranch.stores import SqliteLeaseStore

path, me = sys.argv[1:3]
lease_count, commit_count = map(int, sys.argv[3:])

def say(**words):
    print(json.dumps(words), flush=True)

async def insist(call, *arguments, **options):
    while True:
        try:
            return await call(*arguments, **options)
        except LeaseStoreError as error:
            say(busy=str(error))

async def opened():
    store = SqliteLeaseStore(path, "billing")
    app = await insist(store.open, AppRow(app="billing", app_id=me, created_wall_ms=1))
    await insist(store.register_member, MemberRow(member_id=me, expiry_ms=10_000))
    return store, app
"""

RACER = (
    PREAMBLE
    + """
async def main():
    say(ready=True)
    sys.stdin.readline()
    store, app = await opened()
    won = []
    for number in range(lease_count):
        key = LeaseKey("1:orders:2", 0, f"shardId-{number:012d}")
        await insist(store.create_lease, LeaseRow(key=key))
        row = await insist(store.take_lease, key, me, expected_owner=None, expected_version=0)
        if isinstance(row, LeaseRow):
            won.append(number)
            for _ in range(commit_count):
                row = await insist(store.write_lease, row, member_id=me, expected_version=row.version)
                assert isinstance(row, LeaseRow), row
    for attempt in range(1, 11):
        row = await insist(store.heartbeat, HeartbeatWrite(member_id=me, attempt=attempt))
        assert row.row.counter == attempt, row
    say(app_id=app.app_id, won=won, incarnation=await store.identity())
    await store.close()
asyncio.run(main())
"""
)

COMMITTER = (
    PREAMBLE
    + """
async def main():
    store, app = await opened()
    key = LeaseKey("1:orders:2", 0, "shardId-000000000000")
    await store.create_lease(LeaseRow(key=key))
    row = await store.take_lease(key, me, expected_owner=None, expected_version=0)
    while True:
        number = row.version + 1
        row = await store.write_lease(
            replace(row, checkpoint=Checkpoint(Position(number)), records_handled=number),
            member_id=me, expected_version=row.version,
        )
        say(committed=number)
asyncio.run(main())
"""
)


def start(program, path, member_id):
    command = [sys.executable, "-c", program, str(path), member_id, str(LEASES), str(COMMITS)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


@pytest.fixture
def processes():
    started = []
    yield started
    for process in started:
        process.kill()
        process.communicate(timeout=PATIENCE)


def with_store(path, check):
    async def main():
        store = SqliteLeaseStore(path, "billing")
        try:
            app = await store.open(AppRow(app="billing", app_id="parent", created_wall_ms=1))
            return await check(store, app)
        finally:
            await store.close()

    return asyncio.run(main())


def test_processes_that_start_together_on_a_new_file_agree_on_everything(tmp_path, processes):
    path = tmp_path / "leases.db"
    processes += [start(RACER, path, f"m{number}") for number in range(PROCESSES)]
    for process in processes:
        assert json.loads(process.stdout.readline()) == {"ready": True}
    for process in processes:
        process.stdin.write("go\n")
        process.stdin.flush()
    reports = [json.loads(process.communicate(timeout=PATIENCE)[0].splitlines()[-1]) for process in processes]
    assert [process.returncode for process in processes] == [0] * PROCESSES

    assert len({report["app_id"] for report in reports}) == 1
    assert len({report["incarnation"] for report in reports}) == 1
    assert sorted(number for report in reports for number in report["won"]) == list(range(LEASES))

    async def check(store, app):
        leases = await store.read_leases()
        assert [row.version for row in leases] == [1 + COMMITS] * LEASES
        winners = {number: f"m{index}" for index, report in enumerate(reports) for number in report["won"]}
        assert {int(row.key.shard_id[-12:]): row.owner for row in leases} == winners
        assert app.app_id == reports[0]["app_id"]
        assert await store.identity() == reports[0]["incarnation"]

    with_store(path, check)


def test_a_commit_that_was_acknowledged_outlives_kill_9_and_the_next_owner_need_not_wait(tmp_path, processes):
    path = tmp_path / "leases.db"
    process = start(COMMITTER, path, "victim")
    processes.append(process)
    while json.loads(process.stdout.readline()).get("committed", 0) < 20:
        pass

    async def while_it_is_stopped(store, _app):
        return list((await store.poll()).known_dead)

    process.send_signal(signal.SIGSTOP)
    assert with_store(path, while_it_is_stopped) == []
    process.send_signal(signal.SIGCONT)
    process.kill()
    rest = process.stdout.read()  # whole lines only: the last may have been cut
    acknowledged = [json.loads(line)["committed"] for line in rest.splitlines(keepends=True) if line.endswith("\n")]
    process.wait(30)

    async def afterwards(store, _app):
        assert list((await store.poll()).known_dead) == ["victim"]
        (row,) = await store.read_leases()
        last = max(acknowledged, default=20)
        assert last <= row.version <= last + 1
        assert row.checkpoint.watermark.sequence_number == row.records_handled == row.version
        sealed = await store.seal_member("victim", 0)
        assert sealed.state == "sealed"
        assert list((await store.poll()).known_dead) == []
        key = LeaseKey("1:orders:2", 0, "shardId-000000000000")
        taken = await store.take_lease(key, "next", expected_owner="victim", expected_version=row.version)
        assert isinstance(taken, LeaseRow)

    with_store(path, afterwards)
