"""The commands on applications whose leases are in Redis or S3: they show no password, and end no worker."""

import asyncio
import re

import pytest
from test_cli_dynamodb import make_application, states

from anabranch import Consumer
from anabranch.errors import LeaseStoreInvalidError
from anabranch.stores.urls import open_store

from services import MotoServer, RedisServerProcess


@pytest.fixture(scope="module")
def bucket():
    with MotoServer() as server:
        server.make_bucket("leases")
        yield server


@pytest.fixture(scope="module")
def redis(tmp_path_factory):
    with RedisServerProcess(tmp_path_factory.mktemp("redis")) as server:
        server.call("ACL", "SETUSER", "fleet", "on", ">top-secret", "~anabranch:*", "+@all")
        yield server


@pytest.fixture(params=[pytest.param("redis", marks=pytest.mark.services), pytest.param("s3", marks=pytest.mark.long)])
def leases(request):
    """A store of its own for each test."""
    if request.param == "s3":
        return request.getfixturevalue("bucket").leases(f"leases/{request.node.originalname}")
    server = request.getfixturevalue("redis")
    server.call("FLUSHALL")
    return server.leases(user="fleet:top-secret@")


def test_an_application_is_listed_shown_explained_and_deleted(server, cli, leases, monkeypatch):
    make_application(leases)
    make_application(leases, "audit")
    listed = cli("apps", "ls", "--leases", leases)
    assert re.findall(r"^(\w+) +orders", listed.out, re.MULTILINE) == ["audit", "billing"]
    assert "top-secret" not in listed.out
    assert "top-secret" not in cli("apps", "ls", "--leases", leases, "--json").out
    assert "no worker of the application is alive" in cli("apps", "show", "billing", "--leases", leases).out
    monkeypatch.setenv("ANABRANCH_LEASES", leases)
    assert cli("top", "billing", "--once", "--json").json["app"] == "billing"
    assert "No worker of the application is alive" in cli("explain", "billing").out
    mistaken = cli("apps", "show", "biling")
    assert (mistaken.code, "did you mean 'billing'?" in mistaken.err) == (1, True)
    assert cli("apps", "delete", "billing", "--yes").out == "billing: deleted\n"
    assert [one["app"] for one in cli("apps", "ls", "--json").json] == ["audit"]
    unknown = cli("apps", "show", "billing")
    assert (unknown.code, "there is no application 'billing' in " in unknown.err) == (1, True)
    assert "top-secret" not in unknown.err


def test_a_stopped_application_moves_there_and_back_without_loss_or_replay(server, cli, leases, tmp_path):
    file = f"sqlite://{tmp_path}/leases.db"
    stream = {"redis": "returns", "s3": "moves"}[leases.partition(":")[0]]
    server.call("CreateStream", StreamName=stream, ShardCount=2) if stream == "moves" else None
    for number in range(12):
        server.call("PutRecord", StreamName=stream, PartitionKey="a", Data=str(number).encode())

    async def consume(url, count):
        got = []
        async with Consumer(stream, app="billing", leases=url, until="tip") as consumer:
            async for record in consumer:
                got.append(int(record.data))
                if len(got) == count:
                    break
        return got

    assert asyncio.run(consume(file, 4)) == [0, 1, 2, 3]
    moved = cli("apps", "copy", "billing", "--from", file, "--to", leases)
    assert moved.code == 0, moved.err
    assert "top-secret" not in moved.out
    with pytest.raises(LeaseStoreInvalidError, match=r"'billing' was moved to (redis|s3)://") as caught:
        asyncio.run(consume(file, 1))
    assert "top-secret" not in str(caught.value)
    # The record at which the loop was left had not been acknowledged.
    assert asyncio.run(consume(leases, 5)) == [3, 4, 5, 6, 7]
    other = f"sqlite://{tmp_path}/other.db"
    assert cli("apps", "copy", "billing", "--from", leases, "--to", other).code == 0
    with pytest.raises(LeaseStoreInvalidError, match="was moved to sqlite://"):
        asyncio.run(consume(leases, 1))
    assert asyncio.run(consume(other, None)) == [7, 8, 9, 10, 11]


def test_a_viewer_ends_no_worker_on_s3(server, cli, bucket):
    leases = bucket.leases("leases/viewed")

    async def main():
        async with Consumer("orders", app="billing", leases=leases) as consumer:
            reading = asyncio.create_task(anext(aiter(consumer)))
            while not consumer.status().shards:  # noqa: ASYNC110 -- nothing tells
                await asyncio.sleep(0.02)
            for command in (["apps", "show"], ["explain"], ["top", "--once", "--json"]):
                ended = await asyncio.to_thread(cli, *command, "billing", "--leases", leases)
                assert ended.code == 0, ended.err
            shown = await asyncio.to_thread(cli, "apps", "show", "billing", "--leases", leases, "--json")
            assert [member["state"] for member in shown.json["members"]] == ["live"]
            consumer._ports.store._saved_at = consumer._ports.store._confirmed_at = 0.0
            await consumer._ports.store.poll()  # a save finds nothing of theirs
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)

    asyncio.run(main())


@pytest.mark.services
def test_doctor_checks_redis(server, cli, redis):
    redis.call("FLUSHALL")
    make_application(redis.leases())
    ended = cli("doctor", "--app", "billing", "--leases", redis.leases(user="fleet:top-secret@"))
    found = states(ended)
    assert [found[name] for name in ("store", "latency", "durability", "replicas")] == ["ok"] * 4
    assert "appendonly is on (appendfsync everysec), and nothing is evicted" in ended.out
    ended = cli("doctor", "--leases", redis.leases("?replicas=1"))
    assert (ended.code, states(ended)["replicas"]) == (1, "fail")
    redis.call("CONFIG", "SET", "appendonly", "no")
    try:
        assert states(cli("doctor", "--leases", redis.leases()))["durability"] == "fail"
        accepted = cli("doctor", "--leases", redis.leases("?durability=accept_loss"))
        assert (accepted.code, states(accepted)["durability"]) == (0, "warn")
    finally:
        redis.call("CONFIG", "SET", "appendonly", "yes")
    wrong = cli("doctor", "--leases", redis.leases(user="fleet:other-secret@"))
    assert (wrong.code, states(wrong)["store"]) == (1, "fail")
    assert "secret" not in wrong.out + wrong.err


def test_doctor_checks_a_bucket_and_writes_nothing(server, cli, bucket):
    ended = cli("doctor", "--app", "billing", "--leases", bucket.leases("leases/checked"))
    assert (ended.code, states(ended)["bucket"]) == (0, "ok")
    listed = bucket.s3_client().list_objects_v2(Bucket="leases", Prefix="checked")
    assert listed["KeyCount"] == 0
    ended = cli("doctor", "--leases", bucket.leases("nowhere"))
    assert (ended.code, "there is no bucket 'nowhere'" in ended.out) == (1, True)


def test_the_application_of_a_worker_that_runs_on_s3_is_not_deleted(server, cli, bucket, monkeypatch):
    """A viewer sees a heartbeat only with the next save: it waits for two of them before it calls a worker dead."""
    leases = bucket.leases("leases/running")

    async def main():
        store = open_store(leases, "billing")
        make = asyncio.to_thread(make_application, leases)
        await make
        from anabranch._model.leases import MemberRow
        from anabranch.application import Application

        await store.open(await store.read_app())
        await store.register_member(MemberRow(member_id="a#1", expiry_ms=10_000))
        async with Application("billing", leases=leases) as application:
            (member,) = (await application.status()).members
            assert (member.state, member.expiry) == ("live", 130.0)
        await store.leave("a#1")
        await store.close()

    asyncio.run(main())
