"""`apps`, `top` and `explain` on an application that runs, stops at a record, is killed, and is deleted."""

import asyncio
import os
import pty
import re
import select
import shlex
import signal
import subprocess
import sys

import pytest

from anabranch import Aws, Consumer, ConsumerSettings, LeaseSettings, PollingSettings, Retry
from anabranch._model.leases import AppRow, LeaseKey, LeaseRow, MemberRow, StreamRow
from anabranch._model.streams import TRIM_HORIZON
from anabranch.stores.sqlite import SqliteLeaseStore
from patience import PATIENCE, wait_for

from stream_world import Credentials

PROGRAM = (sys.executable, "-m", "anabranch")
SETTINGS = ConsumerSettings(
    leases=LeaseSettings(expiry=3.0, worker_id="worker one"),
    polling=PollingSettings(idle_interval=0.2, listing_interval=1.0),
)


class Worker:
    """A consumer in the server's own thread, with the embedded store unless `leases` names another."""

    def __init__(self, server, leases=None):
        self._server = server
        self._leases = leases
        self._task = None
        self.consumer = None
        self.handled = []

    def start(self):
        self._server.run(self._start())
        return self

    async def _start(self):
        local = self._server.local
        aws = Aws(region=local.region, endpoint_url=local.endpoint_url, credentials=Credentials())
        self.consumer = Consumer(
            "orders", app="billing", leases=self._leases, settings=SETTINGS, aws=aws, on_failure=Retry(attempts=1)
        )
        self._task = asyncio.get_running_loop().create_task(self.consumer.run(self._handle, handle_signals=False))
        async with asyncio.timeout(PATIENCE):
            while not (self.consumer._consumer_run and self.consumer._consumer_run.has_joined):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            while len(self.consumer.status().shards) < 2:  # noqa: ASYNC110 -- both leases are taken
                await asyncio.sleep(0.01)

    async def _handle(self, record):
        self.handled.append(record.data)
        if record.data == b"poison":
            raise ValueError("no such customer")

    def stop(self):
        if self._task is not None:
            self._server.run(self._stop())

    async def _stop(self):
        await self.consumer.stop()
        await self._task
        self._task = None


@pytest.fixture
def worker(server):
    worker = Worker(server)
    yield worker
    worker.stop()


@pytest.mark.long
def test_a_running_application_is_listed_shown_and_explained(worker, server, cli):
    nothing = cli("apps", "ls")
    assert (nothing.code, nothing.out) == (0, "")
    assert "no applications in the lease files of this machine" in nothing.err
    worker.start()
    (listed,) = cli("apps", "ls", "--json").json
    assert (listed["app"], listed["streams"], listed["live_member_count"]) == ("billing", ["orders"], 1)
    assert (listed["unfinished_shard_count"], listed["stalled_shard_count"]) == (2, 0)
    table = cli("apps", "ls").out.splitlines()
    assert table[0].split() == ["APP", "STREAMS", "WORKERS", "SHARDS", "STALLED", "BEHIND", "LEASES"]
    assert table[1].split()[:5] == ["billing", "orders", "1", "2", "0"]

    shown = cli("apps", "show", "billing")
    assert shown.code == 0
    assert shown.out.startswith("billing: 1 worker live, 2 shards: 2 reading")
    assert re.search(r"^worker one +live", shown.out, re.MULTILINE)
    assert re.search(r"^shardId-000000000001 +reading +worker one", shown.out, re.MULTILINE)
    assert len(cli("apps", "show", "billing", "--json", "--leases", listed["leases"]).json["shards"]) == 2

    advice = cli("apps", "scale", "billing", "--min", "0", "--json").json
    assert (advice["workers"], advice["live_workers"], advice["shard_count"]) == (1, 1, 2)
    assert cli("apps", "scale", "billing", "--min", "2").out == "billing: 2 workers, now 1 (nothing arrives)\n"
    assert "from 0.1 to" in cli("apps", "scale", "billing", "--target-lag", "0").err

    explained = cli("explain", "billing")
    assert explained.code == 0
    assert explained.out.splitlines() == [
        "Application billing reads orders.",
        "1 live worker: worker one.",
        "It is at the tip.",
        "2 shards, none stalled.",
    ]
    one = cli("explain", "billing", "1")
    assert one.out.splitlines()[0] == "shardId-000000000001 of orders is being read."
    assert re.search(r"It is held by worker one, whose last heartbeat was \d+\.\d s ago\.", one.out)


def test_an_application_is_deleted_when_its_workers_have_stopped(worker, cli):
    worker.start()
    asked = cli("apps", "delete", "billing")
    assert asked.code == 2
    assert "Delete application 'billing' (created 20" in asked.err
    assert "and its checkpoints for 2 shards of orders? Not a terminal; pass --yes" in asked.err
    alive = cli("apps", "delete", "billing", "--yes")
    assert alive.code == 1
    assert "application 'billing' has live workers (worker one): stop them first" in alive.err
    worker.stop()
    assert "start a worker, for example with `anabranch run module:consumer`" in cli("explain", "billing").out
    gone = cli("apps", "delete", "billing", "--yes")
    assert (gone.code, gone.out, gone.err) == (0, "billing: deleted\n", "")
    assert cli("apps", "ls", "--json").json == []


@pytest.mark.long
def test_a_stopped_shard_is_explained_by_its_record(worker, server, cli):
    worker.start()
    server.call("PutRecord", StreamName="orders", PartitionKey="user-1", ExplicitHashKey="0", Data=b"poison")
    wait_for(lambda: any(state.phase == "stopped" for state in worker.consumer.status().shards), "the stop")
    (explanation,) = cli("explain", "billing", "--json").json
    assert (explanation["shard_id"], explanation["state"]) == ("shardId-000000000000", "stopped")
    assert "of key 'user-1': its handler failed with ValueError: no such customer" in " ".join(explanation["situation"])
    assert explanation["reason"]["code"] == "stopped-by-handler"
    assert (explanation["reason"]["partition_key"], explanation["reason"]["attempts"]) == ("user-1", 1)
    assert explanation["advice"].startswith("fix the handler for that record, then restart a worker")
    for words in (("top", "billing", "--once"), ("apps", "show", "billing")):
        shown = cli(*words, "--json").json
        assert [shard["reason"] for shard in shown["shards"] if shard["reason"]] == [explanation["reason"]]
        assert shown["lag"] == max(shard["lag"] for shard in shown["shards"] if shard["lag"] is not None)
    frame = cli("top", "billing", "--once").out.splitlines()
    assert frame[1].startswith("1 worker live, 2 shards: 1 reading, 1 stalled")
    first = next(number for number, line in enumerate(frame) if line.startswith("shardId-"))
    assert frame[first].split()[:2] == ["shardId-000000000000", "stopped"]
    assert "ValueError: no such customer" in frame[first + 1]
    resume, skip = explanation["commands"].values()
    assert skip in cli("explain", "billing").out.replace("\n", " ")
    tried = cli(*shlex.split(resume)[1:])
    assert (tried.code, tried.err) == (0, "")
    assert "resumed: the record at which it stopped is tried again" in tried.out
    wait_for(lambda: any(state.phase == "stopped" for state in worker.consumer.status().shards), "the stop again")
    passed = cli(*shlex.split(skip)[1:], "--json").json
    assert (passed["state"], passed["action"]) == ("applied", "skip")
    wait_for(lambda: any(state.counters.skipped_count == 1 for state in worker.consumer.status().shards), "the skip")
    assert {state.phase for state in worker.consumer.status().shards} == {"reading"}
    assert f"skip shardId-000000000000 {passed['position']}: applied" in cli("apps", "show", "billing").out
    nothing = cli(*shlex.split(resume)[1:])
    assert nothing.code == 1
    assert "shardId-000000000000 is not stopped: there is nothing to resume" in nothing.err


@pytest.mark.long
def test_the_installed_program_looks_at_an_application_too(worker, program):
    worker.start()
    for words in (("apps", "ls"), ("apps", "show", "billing"), ("explain", "billing"), ("top", "billing", "--once")):
        ended = program(*words)
        assert (ended.code, ended.err) == (0, "")
        assert "billing" in ended.out


def test_top_continues_in_plain_frames_where_there_is_no_terminal(worker):
    worker.start()
    for options, begins in (((), b"billing  orders  "), (("--json",), b'{"app":"billing"')):
        process = subprocess.Popen(
            [*PROGRAM, "top", "billing", "--interval", "0.1", *options], stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        try:
            frames = 0
            while frames < 3:
                frames += process.stdout.readline().startswith(begins)
            process.send_signal(signal.SIGINT)
            assert process.wait(PATIENCE) == 130
            assert process.stderr.read() == b""
        finally:
            process.kill()
            process.communicate()


@pytest.mark.parametrize("key, code", [(b"q", 0), (None, 130)], ids=["q", "Ctrl-C"])
def test_top_on_a_terminal_redraws_and_leaves_it_as_it_was(worker, key, code):
    worker.start()
    master, slave = pty.openpty()
    environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "80", "LINES": "24"}
    process = subprocess.Popen(
        [*PROGRAM, "top", "billing", "--interval", "0.1"], stdin=slave, stdout=slave, stderr=slave, env=environment
    )
    os.close(slave)
    try:
        shown = b""
        while shown.count(b"worker one") < 4:  # of the third frame
            assert select.select([master], [], [], PATIENCE)[0], "it draws nothing"
            shown += os.read(master, 1 << 16)
        if key is None:
            process.send_signal(signal.SIGINT)
        else:
            os.write(master, key)
        assert process.wait(PATIENCE) == code
        while select.select([master], [], [], 0.2)[0]:
            try:
                shown += os.read(master, 1 << 16)
            except OSError:  # the other end is closed
                break
    finally:
        process.kill()
        process.wait()
        os.close(master)
    assert b"\x1b[?1049h" in shown
    assert shown.rindex(b"\x1b[?1049l") > shown.rindex(b"worker one")
    assert b"Traceback" not in shown


def test_a_dead_fleet_is_distinguished_from_a_live_one(cli, tmp_path):
    """Rows that say live, without a process that holds their lock; and a child that waits for its parent."""
    path = tmp_path / "leases.db"

    async def main():
        store = SqliteLeaseStore(path, "billing")
        await store.open(AppRow(app="billing", app_id="id", created_wall_ms=0))
        await store.put_stream(
            StreamRow(stream_key="k", name="orders", arn="arn", created_seconds=0.0, origin=TRIM_HORIZON)
        )
        await store.register_member(MemberRow(member_id="a#1", expiry_ms=500))
        parent, child = "shardId-000000000000", "shardId-000000000001"
        await store.create_lease(LeaseRow(key=LeaseKey("k", 0, parent), owner="a#1"))
        await store.create_lease(LeaseRow(key=LeaseKey("k", 0, child), waits_for=(parent,)))
        await store.close()  # and with it the member's lock

    asyncio.run(main())
    leases = ("--leases", f"sqlite://{path}")
    out = cli("explain", "billing", *leases).out
    assert "The process of worker a is gone: it did not shut down cleanly." in out
    assert "shardId-000000000000 of orders is held by a worker without heartbeats." in out
    assert "shardId-000000000001 of orders waits for its parents." in out
    assert "see why shardId-000000000000 is stalled" in out
    assert re.search(r"^a +dead ", cli("apps", "show", "billing", *leases).out, re.MULTILINE)
    assert cli("apps", "delete", "billing", "--yes", *leases).out == "billing: deleted\n"


@pytest.mark.parametrize("words", [("apps", "show"), ("apps", "delete", "--yes"), ("top",), ("explain",)])
def test_an_application_that_is_not_there_is_answered_with_those_that_are(worker, cli, words):
    none = cli(*words, "billing")
    assert (none.code, none.out) == (1, "")
    assert "there is no application 'billing' in " in none.err
    worker.start()
    similar = cli(*words, "biling")
    assert similar.code == 1
    assert "did you mean 'billing'?" in similar.err


@pytest.mark.long
def test_a_shard_without_a_lease_is_explained_by_the_ancestors_that_are_still_read(worker, server, cli):
    """Children and grandchildren of a shard that stopped: their leases are made when it has been read to its end."""
    worker.start()
    server.call("PutRecord", StreamName="orders", PartitionKey="x", ExplicitHashKey="0", Data=b"poison")
    wait_for(lambda: cli("explain", "billing", "0", "--json").json[0]["state"] == "stopped", "the stop")
    server.call("SplitShard", StreamName="orders", ShardToSplit="0", NewStartingHashKey=str(1 << 100))
    server.call("SplitShard", StreamName="orders", ShardToSplit="2", NewStartingHashKey=str(1 << 90))
    for child in ("2", "3", "4", "5"):
        (explanation,) = cli("explain", "billing", child, "--json").json
        assert explanation["shard_id"] == f"shardId-00000000000{child}"
        assert (explanation["stream"], explanation["state"]) == ("orders", "waiting")
        assert "shardId-000000000000 has stopped" in explanation["situation"][-1]
        assert "see why shardId-000000000000 is stalled" in explanation["advice"]
    assert "It has no lease yet" in cli("explain", "billing", "2").out
    unknown = cli("explain", "billing", "6")
    assert (unknown.code, unknown.out) == (1, "")
    assert "has no lease for shardId-000000000006, and no stream of it has that shard" in unknown.err
    elsewhere = cli("explain", "billing", "2", "--endpoint-url", "http://127.0.0.1:9")
    assert (elsewhere.code, elsewhere.out) == (1, "")
    assert "has no lease for shardId-000000000002" in elsewhere.err
    assert "if it is a child of one of these" in elsewhere.err
    assert "127.0.0.1:9" in elsewhere.err


def test_a_merged_shard_is_explained_by_the_parent_that_is_not_finished(worker, server, cli):
    worker.start()
    server.call("PutRecord", StreamName="orders", PartitionKey="x", ExplicitHashKey="0", Data=b"poison")
    wait_for(lambda: cli("explain", "billing", "0", "--json").json[0]["state"] == "stopped", "the stop")
    server.call("MergeShards", StreamName="orders", ShardToMerge="0", AdjacentShardToMerge="1")
    explanation = wait_for(
        lambda: [
            one
            for one in cli("explain", "billing", "2", "--json").json
            if "shardId-000000000001" not in one["situation"][-1]  # until that one has been read to its end
        ],
        "the end of the other parent",
    )[0]
    assert explanation["state"] == "waiting"
    assert "shardId-000000000000 has stopped" in explanation["situation"][-1]


@pytest.mark.parametrize(
    "words, code, advice",
    [
        (("apps",), 2, "the following arguments are required: ACTION"),
        (("apps", "ls", "--leases", "ftp://leases"), 2, "is not a lease store: supported are dynamodb://"),
        (("apps", "show", "billing", "--leases", "postgresql://host"), 2, "is not supported yet"),
        (("explain", "billing", "--leases", "sqlite:///nowhere/x.db"), 1, "no file /nowhere/x.db"),
        (("top", "billing", "--interval", "0"), 2, "is not a number of seconds from 0.1 to 3600"),
        (("top", "billing", "--interval", "soon"), 2, "is not a number of seconds"),
        (("explain", "billing", "first"), 2, "its number alone is enough"),
        (("explain", "billing", "7"), 1, "application 'billing' has no lease for shardId-000000000007"),
    ],
)
def test_mistakes_are_answered_with_what_would_be_right(worker, cli, words, code, advice):
    if words[0] == "explain":
        worker.start()
    ended = cli(*words)
    assert (ended.code, ended.out) == (code, "")
    assert advice in ended.err
