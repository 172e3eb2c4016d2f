"""`apps skip` and `apps resume` on stores that are servers: with a fleet that runs, and with none (rule C3)."""

import asyncio

import pytest
from test_cli_fleet import Worker

from anabranch._model.leases import MemberRow
from anabranch.stores.urls import open_store
from patience import wait_for

from services import RedisServerProcess, dynamodb_local, moto_dynamodb

SHARD = "shardId-000000000000"


@pytest.fixture(
    params=[
        "moto",
        pytest.param("dynamodb-local", marks=pytest.mark.services),
        pytest.param("redis", marks=pytest.mark.services),
    ]
)
def leases(request, tmp_path):
    if request.param == "redis":
        with RedisServerProcess(tmp_path / "redis") as server:
            yield server.leases()
    else:
        with moto_dynamodb() if request.param == "moto" else dynamodb_local(tmp_path / "dynamodb") as server:
            yield server.leases("commands")


@pytest.fixture
def worker(server, leases):
    worker = Worker(server, leases)
    yield worker
    worker.stop()


def put(server, data):
    put = server.call("PutRecord", StreamName="orders", PartitionKey="user-1", ExplicitHashKey="0", Data=data)
    return put["SequenceNumber"]


def phases(worker):
    return {state.shard_id: state.phase for state in worker.consumer.status().shards}


def wait_for_stop(worker):
    wait_for(lambda: phases(worker).get(SHARD) == "stopped", "the stop")


def test_a_running_fleet_resumes_a_stopped_shard_and_skips_its_record(server, cli, leases, worker):
    worker.start()
    failing = put(server, b"poison")
    put(server, b"after")
    wait_for_stop(worker)
    resumed = cli("apps", "resume", "billing", "0", "--leases", leases, "--json").json
    assert (resumed["state"], resumed["position"]) == ("applied", None)
    assert resumed["result"].startswith("resumed: the record at which it stopped is tried again (by worker one#")
    wait_for(lambda: worker.handled.count(b"poison") == 2, "the second attempt")
    wait_for_stop(worker)
    skipped = cli("apps", "skip", "billing", "0", failing, "--leases", leases, "--json").json
    assert (skipped["state"], skipped["position"]) == ("applied", failing)
    assert skipped["result"].startswith(f"record {failing} will be skipped (by worker one#")
    wait_for(lambda: b"after" in worker.handled, "the record behind it")
    assert worker.handled == [b"poison", b"poison", b"after"]
    assert phases(worker)[SHARD] == "reading"
    shown = cli("apps", "show", "billing", "--leases", leases).out
    assert f"skip {SHARD} {failing}: applied" in shown
    assert f"resume {SHARD}: applied" in shown


def test_without_a_fleet_the_command_itself_resumes_and_skips(server, cli, leases, worker):
    worker.start()
    failing = put(server, b"poison")
    put(server, b"after")
    wait_for_stop(worker)
    worker.stop()
    resumed = cli("apps", "resume", "billing", "0", "--leases", leases)
    assert resumed.err == ""
    assert resumed.out == (
        f"billing/{SHARD}: resumed: the record at which it stopped is tried again (no worker was running)\n"
    )
    skipped = cli("apps", "skip", "billing", "0", failing, "--leases", leases)
    assert skipped.err == ""
    assert skipped.out == f"billing/{SHARD}: record {failing} will be skipped (no worker was running)\n"
    nothing = cli("apps", "resume", "billing", "0", "--leases", leases)
    assert (nothing.code, "is not stopped: there is nothing to resume" in nothing.err) == (1, True)
    shown = cli("apps", "show", "billing", "--leases", leases, "--json").json
    assert not [member for member in shown["members"] if member["state"] == "live"]  # each command has left again
    worker.start()
    wait_for(lambda: b"after" in worker.handled, "the record behind it")
    assert worker.handled == [b"poison", b"after"]


def test_the_lease_of_a_killed_worker_is_taken_by_the_command(server, cli, leases, worker):
    worker.start()
    failing = put(server, b"poison")
    put(server, b"after")
    wait_for_stop(worker)
    worker.stop()
    asyncio.run(own_and_be_killed(leases))
    skipped = cli("apps", "skip", "billing", "0", failing, "--leases", leases)
    assert skipped.err == ""
    assert skipped.out == f"billing/{SHARD}: record {failing} will be skipped (no worker was running)\n"
    members = cli("apps", "show", "billing", "--leases", leases, "--json").json["members"]
    assert {member["worker_id"]: member["state"] for member in members}["killed"] == "evicted"
    assert "live" not in {member["state"] for member in members}
    worker.start()
    wait_for(lambda: b"after" in worker.handled, "the record behind it")
    assert worker.handled == [b"poison", b"after"]


async def own_and_be_killed(leases):
    """A member that takes the lease and never sends a heartbeat."""
    store = open_store(leases, "billing")
    await store.open(await store.read_app())
    await store.register_member(MemberRow(member_id="killed#1", expiry_ms=300))
    lease = next(row for row in await store.read_leases() if row.key.shard_id == SHARD)
    taken = await store.take_lease(lease.key, "killed#1", expected_owner=lease.owner, expected_version=lease.version)
    assert taken.stopped is not None
    await store.close()
