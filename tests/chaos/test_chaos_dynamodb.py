"""Fleets of real processes on DynamoDB Local: a short run of all faults, and a table deleted under its workers."""

import asyncio
import time
from pathlib import Path

import pytest
import store_chaos
from traffic import Traffic
from worker_fleet import Fleet
from worker_process import WorkerOptions

from anabranch.stores.urls import open_store
from patience import PATIENCE

from services import dynamodb_local
from stream_world import stream_world

pytestmark = [pytest.mark.long, pytest.mark.services, pytest.mark.timeout(300)]


def test_a_fleet_keeps_every_promise_while_workers_are_killed_and_cut_off_and_its_store_is_killed(tmp_path):
    found = asyncio.run(store_chaos.run_chaos("dynamodb", str(tmp_path), seconds=25, seed=1, patience=150, workers=4))
    print(store_chaos.describe("dynamodb", found))
    assert found.report.ok, found.report
    assert found.report.zombie_count == 0


def delete_table(store):
    client = store.boto3_client()
    client.update_table(TableName="anabranch", DeletionProtectionEnabled=False)
    client.delete_table(TableName="anabranch")


async def ended(worker):
    async with asyncio.timeout(PATIENCE):
        await worker.process.wait()
    return worker.process.returncode


@pytest.fixture
def _credentials(monkeypatch):
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "local")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "local")


@pytest.mark.usefixtures("_credentials")
@pytest.mark.parametrize("is_created_again", [False, True])
def test_a_deleted_table_stops_its_workers_with_an_error_and_no_new_application_is_created(tmp_path, is_created_again):
    """The workers are stopped while somebody creates the table again: they never see it missing."""

    async def main():
        with dynamodb_local(tmp_path / "dynamodb") as store:
            options = WorkerOptions(stream="orders", app="billing", folder=str(tmp_path), leases=store.leases())
            async with stream_world(shards=2) as world, Fleet(options, world.kinesis.environment()) as fleet:
                workers = await fleet.join(2)
                for worker in workers:
                    worker.stop()
                delete_table(store)
                if is_created_again:
                    await make_another(store)
                for worker in workers:
                    worker.resume()
                assert [await ended(worker) for worker in workers] == [1, 1]
                said = [Path(tmp_path, worker.name).read_text() for worker in workers]  # noqa: ASYNC240 -- a moment
                words = ["no longer holds application 'billing' as this worker knows it"]
                if not is_created_again:  # seen once: a worker found the application gone before the table
                    words.append("there is no DynamoDB table 'anabranch': check its name")
                for text in said:
                    assert any(one in text for one in words), text
                tables = store.boto3_client().list_tables()["TableNames"]
                if is_created_again:
                    found = open_store(store.leases(), "billing")
                    assert await found.read_app() is None
                    assert await found.applications() == ["another"]
                    await found.close()
                else:
                    assert tables == []

    asyncio.run(main())


async def make_another(store):
    from anabranch._model.leases import AppRow

    other = open_store(store.leases(), "another")
    await other.open(AppRow(app="another", app_id="id", created_wall_ms=0))
    await other.close()


def restore_table(store):
    """As point-in-time recovery does: into a table with another name."""
    client = store.boto3_client()
    table = client.describe_table(TableName="anabranch")["Table"]
    client.create_table(
        TableName="restored",
        BillingMode="PAY_PER_REQUEST",
        **{name: table[name] for name in ("KeySchema", "AttributeDefinitions")},
    )
    for item in client.scan(TableName="anabranch")["Items"]:
        client.put_item(TableName="restored", Item=item)


@pytest.mark.usefixtures("_credentials")
def test_workers_continue_in_a_restored_table_after_all_other_leases_have_expired(tmp_path):
    async def main():
        with dynamodb_local(tmp_path / "dynamodb") as store:
            options = WorkerOptions(stream="orders", app="billing", folder=str(tmp_path), leases=store.leases())
            async with stream_world(shards=2) as world, Fleet(options, world.kinesis.environment()) as fleet:
                (worker,) = await fleet.join(1)
                traffic = Traffic(world, ["a", "b"], fleet.auditor, aggregate=False)
                await traffic.round(10)
                await fleet.until(lambda: fleet.auditor.outstanding_count == 0, "the first records")
                await worker.terminate()
                restore_table(store)
                await traffic.round(10)
                began = time.monotonic()
                (worker,) = await fleet.start(leases=store.leases("restored"))
                await fleet.until(lambda: fleet.auditor.outstanding_count == 0, "the other records")
                assert time.monotonic() - began > 10
                await worker.terminate()
                assert fleet.auditor.report().ok
                starts = [effect for effect in fleet.effects if effect.kind == "start"]
                assert len(starts) == 40
                await traffic.close()

    asyncio.run(main())
