"""The S3 store with a real worker on a local Kinesis: what it saves, who takes over, and what happens when answers are
lost, the object is changed by others, or the server ignores conditions.
"""

import asyncio
import contextlib
import json
import logging
from functools import partial

import pytest
from msgspec.structs import replace

from anabranch import Consumer
from anabranch._model.leases import AppRow, HeartbeatWrite, LeaseKey, LeaseRow, MemberRow, Stopped, StreamRow
from anabranch._model.streams import TRIM_HORIZON, Position
from anabranch.application import Application
from anabranch.config import Aws
from anabranch.errors import LeaseStoreError, LeaseStoreInvalidError, UsageError
from anabranch.reasons import StoppedByCrashes
from anabranch.stores import s3
from anabranch.stores.s3 import S3LeaseStore
from network_proxy import NetworkProxy
from patience import PATIENCE

from services import MotoServer
from stream_world import stream_world, until

APP = AppRow(app="billing", app_id="first", created_wall_ms=0)
KEY = LeaseKey("1:orders:1", 0, "shardId-000000000000")
STREAM = StreamRow(stream_key="1:orders:1", name="orders", arn="arn", created_seconds=1.0, origin=TRIM_HORIZON)


@pytest.fixture(scope="module")
def server():
    with MotoServer() as server:
        server.make_bucket("leases")
        yield server


@pytest.fixture(scope="module")
def aws():
    import boto3

    return Aws(session=boto3.Session("x", "y", region_name="eu-west-1"))


@pytest.fixture
def bucket(server, aws, request):
    return Bucket(server, aws, request.node.name)


class Bucket:
    """One prefix for each test."""

    def __init__(self, server, aws, prefix):
        self.server, self.aws, self.prefix = server, aws, prefix
        self._client = server.s3_client()

    def store(self, app="billing", *, port=None):
        url = f"http://127.0.0.1:{port or self.server.port}"
        return S3LeaseStore("leases", self.prefix, app, endpoint_url=url, aws=self.aws)

    @property
    def key(self):
        return {"Bucket": "leases", "Key": f"{self.prefix}/billing/latest.json"}

    def read(self):
        return json.loads(self._client.get_object(**self.key)["Body"].read())

    def write(self, body):
        self._client.put_object(**self.key, Body=body)

    def delete(self):
        self._client.delete_object(**self.key)


@pytest.fixture
def time_passes(monkeypatch):
    """Makes the store believe that so many seconds have passed."""
    ahead = [0.0]
    now = s3._now
    monkeypatch.setattr(s3, "_now", lambda: now() + ahead[0])

    def passed(seconds):
        ahead[0] += seconds

    return passed


async def joined(store, worker="a"):
    """A worker that has joined and holds the lease."""
    row = await store.open(APP)
    await store.put_stream(STREAM)
    await store.create_lease(LeaseRow(key=KEY))
    await store.register_member(MemberRow(member_id=f"{worker}#1", expiry_ms=10_000))
    lease = await store.read_lease(KEY)
    taken = await store.take_lease(KEY, f"{worker}#1", expected_owner=lease.owner, expected_version=lease.version)
    assert isinstance(taken, LeaseRow)
    return row


def check(work):
    asyncio.run(work())


def test_positions_are_saved_every_minute_and_at_the_stop(bucket, time_passes):
    async def work():
        store = bucket.store()
        await joined(store)
        assert bucket.read()["shards"] == {
            "orders/shardId-000000000000": {"sequence_number": None, "timestamp": None, "finished": False}
        }
        first = bucket.read()["nonce"]
        await store.poll()
        assert bucket.read()["nonce"] == first
        time_passes(61)
        await store.poll()
        second = bucket.read()
        assert (second["nonce"] != first, second["saved_by"]) == (True, "a")
        time_passes(61)
        await store.poll()
        assert bucket.read()["nonce"] == second["nonce"], "nothing has changed"
        await store.leave("a#1")
        assert bucket.read()["nonce"] != second["nonce"]
        await store.close()
        reader = bucket.store()
        await reader.open(APP)
        assert [(row.member_id, row.state) for row in (await reader.poll()).members] == [("a#1", "left")]
        await reader.close()

    check(work)


def test_a_second_worker_takes_over_and_the_first_ends_at_its_next_save(bucket, time_passes):
    async def work():
        first, second = bucket.store(), bucket.store()
        await joined(first)
        token = (await first.read_lease(KEY)).fence_token
        await joined(second, "b")
        lease = await second.read_lease(KEY)
        assert (lease.owner, lease.fence_token > token) == ("b#1", True)
        await first.poll()  # until its next save it knows nothing of the other
        time_passes(61)
        for _ in range(2):
            with pytest.raises(LeaseStoreInvalidError, match="worker 'b' has written the positions") as caught:
                await first.poll()
            assert caught.value.code == "taken_over"
        before = bucket.read()
        await first.leave("a#1")
        await first.close()
        assert bucket.read() == before, "it writes nothing more"
        await second.poll()
        await second.close()

    check(work)


@pytest.mark.parametrize("is_changed", [True, False])
def test_an_idle_worker_notices_it_as_well(bucket, time_passes, is_changed):
    async def work():
        first, second = bucket.store(), bucket.store()
        await joined(first)
        time_passes(61)
        await first.poll()
        if is_changed:
            await joined(second, "b")
        time_passes(61)
        if is_changed:
            with pytest.raises(LeaseStoreInvalidError, match="an application on S3 has one worker"):
                await first.poll()
        else:
            assert (await first.poll()).app == await first.read_app()
        await first.close()
        await second.close()

    check(work)


def test_a_save_whose_answer_is_lost_is_recognised_by_its_nonce(bucket, time_passes):
    async def work():
        proxy = await NetworkProxy(bucket.server.port).start()
        store = bucket.store(port=proxy.port)
        await joined(store)
        for _ in range(3):
            time_passes(61)
            await store.renew_watch()  # something to save
            before = bucket.read()["nonce"]
            proxy.loses_answers = True
            with pytest.raises(LeaseStoreError, match="gave no answer"):
                await store.poll()
            proxy.loses_answers = False
            assert bucket.read()["nonce"] != before, "it took effect"
            assert (await store.poll()).app is not None
        await store.leave("a#1")
        await store.close()
        await proxy.close()
        assert bucket.read()["saved_by"] == "a"

    check(work)


def test_a_save_that_was_given_up_and_arrives_late_is_the_workers_own(bucket, time_passes):
    async def work():
        store = bucket.store()
        await joined(store)
        time_passes(61)
        await store.renew_watch()
        with bucket.server.stopped(), contextlib.suppress(TimeoutError):
            async with asyncio.timeout(0.1):
                await store.poll()
        for _ in range(3):
            await store.poll()
            time_passes(61)
            await store.renew_watch()
        await store.close()

    check(work)


@pytest.mark.parametrize("how", ["restored", "edited", "nonsense"])
def test_an_object_that_another_program_changes_ends_the_worker(bucket, time_passes, how):
    async def work():
        store = bucket.store()
        await joined(store)
        earlier = bucket.read()
        time_passes(61)
        await store.poll()
        if how == "restored":
            bucket.write(json.dumps(earlier))
        else:
            bucket.write("{" if how == "nonsense" else json.dumps(bucket.read() | {"nonce": "by hand"}))
        time_passes(61)
        await store.renew_watch()
        words = "cannot be read" if how == "nonsense" else "has written the positions of application 'billing'"
        with pytest.raises(LeaseStoreInvalidError, match=words):
            await store.poll()
        await store.close()

    check(work)


def test_an_object_that_is_deleted_shows_as_an_application_that_is_gone(bucket, time_passes):
    async def work():
        store = bucket.store()
        await joined(store)
        bucket.delete()
        time_passes(61)
        assert (await store.poll()).app is None
        await store.leave("a#1")
        await store.close()
        with pytest.raises(bucket._client.exceptions.NoSuchKey):
            bucket.read()

    check(work)


def test_a_server_that_ignores_conditions_is_refused_before_anything_is_written(aws):
    async def work():
        with MotoServer("ignore-conditions") as server:
            server.make_bucket("leases")
            store = Bucket(server, aws, "x").store()
            with pytest.raises(LeaseStoreInvalidError, match="ignores If-Match and If-None-Match") as caught:
                await store.open(APP)
            assert caught.value.code == "conditions_ignored"
            await store.close()
            names = [one["Key"] for one in server.s3_client().list_objects_v2(Bucket="leases")["Contents"]]
            assert names == ["x/billing/probe"]

    check(work)


class CountingProxy(NetworkProxy):
    """Calls `on_put` with each PUT: how many there were since `puts` was set to 0."""

    puts = 0

    def on_put(self, count):
        """For the test."""

    def on_request(self, data):
        if data.startswith(b"PUT "):
            self.puts += 1
            self.on_put(self.puts)


@pytest.fixture
def ignoring(bucket, aws):
    """A server that ignores conditions, and has an application that was written through one that honours them."""

    async def work():
        await joined(store := bucket.store())
        await store.leave("a#1")
        await store.close()

    check(work)
    with MotoServer("ignore-conditions") as server:
        server.make_bucket("leases")
        ignoring = Bucket(server, aws, bucket.prefix)
        ignoring.write(json.dumps(bucket.read()))
        yield ignoring


def test_a_probe_whose_answer_is_lost_is_made_again(ignoring):
    async def work():
        proxy = await CountingProxy(ignoring.server.port).start()
        store = ignoring.store(port=proxy.port)
        await store.open(APP)
        row = MemberRow(member_id="b#1", expiry_ms=10_000)

        def lose_second(count):
            proxy.loses_answers = count == 2

        proxy.on_put = lose_second
        with pytest.raises(LeaseStoreError, match="gave no answer"):
            await store.register_member(row)
        proxy.loses_answers = False
        with pytest.raises(LeaseStoreInvalidError, match="ignores If-Match and If-None-Match"):
            await store.register_member(row)
        await store.close()
        await proxy.close()

    check(work)
    assert ignoring.read()["saved_by"] == "a"


def test_a_probe_that_takes_longer_than_a_call_may_is_continued_by_the_next_call(ignoring):
    async def work():
        proxy = await CountingProxy(ignoring.server.port).start()
        store = ignoring.store(port=proxy.port)
        await store.open(APP)
        row = MemberRow(member_id="b#1", expiry_ms=10_000)

        async def join():
            call = asyncio.create_task(store.register_member(row))
            proxy.puts = 0
            proxy.on_put = lambda count: count == 2 and call.cancel()
            await call

        with pytest.raises(asyncio.CancelledError):
            await join()
        with pytest.raises(LeaseStoreInvalidError, match="ignores If-Match and If-None-Match"):
            await join()
        await store.close()
        await proxy.close()

    check(work)


def test_while_s3_is_away_heartbeats_end_and_a_save_lets_them_continue(bucket, time_passes):
    async def work():
        proxy = await NetworkProxy(bucket.server.port).start()
        store = bucket.store(port=proxy.port)
        await joined(store)
        time_passes(70)
        proxy.loses_answers = True
        with pytest.raises(LeaseStoreError):
            await store.poll()
        beat = HeartbeatWrite(member_id="a#1", attempt=1)
        assert (await store.heartbeat(beat)).row is not None
        time_passes(10)
        with pytest.raises(LeaseStoreError, match=r"has confirmed no save for 8\d s"):
            await store.heartbeat(beat)
        proxy.loses_answers = False
        await store.poll()
        assert (await store.heartbeat(beat)).row is not None
        await store.close()
        await proxy.close()

    check(work)


def test_a_worker_that_was_killed_before_its_first_save_counts_as_an_owner(bucket):
    async def work():
        for _ in range(3):
            await joined(store := bucket.store())
            store._joined = None  # killed: it saves nothing more
            await store.close()
        last = bucket.store()
        await joined(last)
        assert (await last.read_lease(KEY)).takes_without_progress == 4
        await last.leave("a#1")
        await joined(last, "b")
        assert (await last.read_lease(KEY)).takes_without_progress == 5, "only the take"
        await last.close()
        await joined(last := bucket.store(), "c")
        assert (await last.read_lease(KEY)).takes_without_progress == 6, "the take of b had been saved"
        await last.close()

    check(work)


def test_commands_reach_a_stopped_application_and_are_refused_while_a_worker_runs(bucket):
    async def work():
        await joined(store := bucket.store())
        application = Application("billing", leases=bucket.store())
        with pytest.raises(UsageError, match="cannot be sent commands while it runs: stop it first"):
            await application.skip(KEY.shard_id, "7")
        lease = await store.read_lease(KEY)
        stopped = Stopped(StoppedByCrashes(owner_count=6), Position(7), "user-1", "a#1", 0)
        await store.write_lease(replace(lease, stopped=stopped), member_id="a#1", expected_version=lease.version)
        await store.leave("a#1")
        await store.close()
        result = await application.skip(KEY.shard_id, "7")
        assert (result.state, "no worker was running" in result.result) == ("applied", True), result
        await application.close()
        await application._leases.close()
        await joined(store := bucket.store(), "b")
        assert (await store.read_lease(KEY)).stopped is None
        await store.close()

    check(work)


def test_what_is_left_at_the_end_is_saved_or_reported(bucket, caplog):
    async def work(port=None):
        await joined(store := bucket.store(port=port))
        await store.close()
        return store

    check(work)
    assert [row for row in bucket.read()["rows"] if row.startswith("lease")]

    async def without_answers():
        proxy = await NetworkProxy(bucket.server.port).start()
        await joined(store := bucket.store(port=proxy.port))
        proxy.loses_answers = True
        with caplog.at_level(logging.WARNING):
            await store.close()
        await proxy.close()

    check(without_answers)
    assert "what was handled since the last save will be handled again" in caplog.text


def test_a_close_does_not_wait_for_a_server_that_does_not_answer(bucket, caplog, monkeypatch):
    monkeypatch.setattr(s3, "_CLOSE_SECONDS_MAX", 0.1)

    async def work():
        await joined(store := bucket.store())
        with bucket.server.stopped():
            async with asyncio.timeout(PATIENCE):
                await store.close()

    check(work)
    assert "what was handled since the last save will be handled again" in caplog.text


def test_what_is_missing_is_named(bucket):
    async def work():
        store = S3LeaseStore("nowhere", "", "billing", endpoint_url=bucket.server.url, aws=bucket.aws)
        with pytest.raises(LeaseStoreInvalidError, match="there is no bucket 'nowhere'") as caught:
            await store.read_app()
        assert caught.value.code == "bucket_missing"
        await store.close()

    check(work)


def test_fields_of_a_newer_version_are_kept(bucket):
    async def work():
        store = bucket.store()
        await joined(store)
        await store.leave("a#1")
        document = bucket.read()
        document["rows"]["lease first"][0]["colour"] = "red"
        bucket.write(json.dumps(document))
        await joined(store)
        await store.leave("a#1")
        assert bucket.read()["rows"]["lease first"][0]["colour"] == "red"
        await store.close()

    check(work)


def test_a_consumer_continues_where_it_stopped(bucket):
    async def work():
        async with stream_world(shards=2) as world:
            for number in range(20):
                world.call("PutRecord", PartitionKey=f"key-{number}", Data=str(number).encode())

            async def consume(count=None):
                got, store = [], bucket.store()
                consumer = Consumer("orders", app="billing", leases=store, aws=world.aws, until="tip")
                async with consumer:
                    async for record in consumer:
                        got.append(int(record.data))
                        if len(got) == count:
                            break
                await store.close()
                return got

            first = await consume(8)
            rest = await consume()
            assert sorted([*first[:-1], *rest]) == list(range(20))  # the last one had not been acknowledged
            assert await consume() == []
            saved = bucket.read()["shards"]
            assert all(int(shard["sequence_number"]) for shard in saved.values())

    check(work)


def test_a_second_consumer_takes_over_and_the_first_raises_that_reason(bucket, monkeypatch):
    monkeypatch.setattr(s3, "_SAVED_EVERY_SECONDS", 0.5)

    async def work():
        async with stream_world(shards=2) as world:
            stores = [bucket.store(), bucket.store()]
            consumers = [Consumer("orders", app="billing", leases=store, aws=world.aws) for store in stores]
            got = [[], []]

            async def handle(number, record):
                got[number].append(int(record.data))

            def run(number):
                consume = consumers[number].run(partial(handle, number), handle_signals=False)
                return asyncio.create_task(consume)

            def put(*numbers):
                for number in numbers:
                    world.call("PutRecord", PartitionKey=f"key-{number}", Data=str(number).encode())

            first = run(0)
            put(*range(10))
            await until(lambda: len(got[0]) == 10, "the first records")
            second = run(1)
            with pytest.raises(LeaseStoreInvalidError, match="has written the positions") as caught:
                await first
            assert caught.value.code == "taken_over"
            put(*range(10, 20))
            await until(lambda: {*got[0], *got[1]} == {*range(20)}, "the other records")
            await consumers[1].stop()
            assert (await second).clean
            for store in stores:
                await store.close()

    check(work)


def test_several_workers_do_not_share_it(bucket):
    """`run --workers` refuses it: the workers would take over from each other."""
    assert not Consumer("orders", app="billing", leases="s3://bucket").shares_leases
    assert not Consumer("orders", app="billing", leases=bucket.store()).shares_leases
    assert Consumer("orders", app="billing", leases="dynamodb://").shares_leases
