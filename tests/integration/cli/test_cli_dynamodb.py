"""The commands on an application whose leases are in DynamoDB: they take the URL, or ANABRANCH_LEASES."""

import asyncio
import json
import re
import signal
import subprocess
import sys

import pytest

from anabranch import Consumer
from anabranch._model.leases import AppRow, LeaseKey, LeaseRow, StreamRow
from anabranch._model.streams import TRIM_HORIZON
from anabranch.errors import LeaseStoreError, LeaseStoreInvalidError
from anabranch.stores.urls import open_store
from patience import PATIENCE

from services import dynamodb_local, moto_dynamodb

STREAM_KEY = "000000000000:orders:1"


@pytest.fixture(scope="module")
def dynamodb():
    with moto_dynamodb() as server:
        yield server


def states(ended):
    return {line.split()[1]: line.split()[0] for line in ended.out.splitlines() if not line.startswith(" ")}


def make_application(leases, app="billing"):
    async def main():
        store = open_store(leases, app)
        await store.open(AppRow(app=app, app_id=f"id of {app}", created_wall_ms=0))
        await store.put_stream(
            StreamRow(stream_key=STREAM_KEY, name="orders", arn="arn", created_seconds=1.0, origin=TRIM_HORIZON)
        )
        await store.create_lease(LeaseRow(key=LeaseKey(STREAM_KEY, 0, "shardId-000000000000")))
        await store.close()

    asyncio.run(main())


def test_an_application_is_listed_shown_explained_and_deleted(server, cli, dynamodb, monkeypatch):
    leases = dynamodb.leases("listed")
    make_application(leases)
    make_application(leases, "audit")
    assert [one["app"] for one in cli("apps", "ls", "--leases", leases, "--json").json] == ["audit", "billing"]
    assert "no worker of the application is alive" in cli("apps", "show", "billing", "--leases", leases).out
    monkeypatch.setenv("ANABRANCH_LEASES", leases)
    assert cli("apps", "show", "billing", "--json").json["app"] == "billing"
    assert cli("top", "billing", "--once", "--json").json["app"] == "billing"
    assert "No worker of the application is alive" in cli("explain", "billing").out
    mistaken = cli("apps", "show", "biling")
    assert (mistaken.code, "did you mean 'billing'?" in mistaken.err) == (1, True)
    assert cli("apps", "delete", "billing", "--yes").out == "billing: deleted\n"
    assert [one["app"] for one in cli("apps", "ls", "--json").json] == ["audit"]


@pytest.mark.long
def test_top_without_a_terminal_says_that_the_store_does_not_answer_and_continues(server, dynamodb, monkeypatch):
    leases = dynamodb.leases("paused")
    make_application(leases)
    command = [sys.executable, "-m", "anabranch", "top", "billing", "--leases", leases, "--json", "--interval", "0.1"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert json.loads(process.stdout.readline())["app"] == "billing"
        with dynamodb.stopped():
            assert "DynamoDB" in process.stderr.readline()
        for _ in range(20):  # also those that were printed before
            assert json.loads(process.stdout.readline())["lag"] is None
        process.send_signal(signal.SIGINT)
        assert process.wait(PATIENCE) == 130
    finally:
        process.kill()
        process.communicate()


def test_a_deletion_that_was_interrupted_is_found_and_completed(server, cli, dynamodb, monkeypatch):
    monkeypatch.setenv("ANABRANCH_LEASES", dynamodb.leases("interrupted"))
    make_application(dynamodb.leases("interrupted"))
    client, partition = dynamodb.boto3_client(), {"S": "a#billing"}
    client.put_item(TableName="interrupted", Item={"PK": partition, "SK": {"S": "d#id of billing"}})
    assert "deletion" not in states(cli("doctor", "--app", "billing"))  # its row is still there
    client.delete_item(TableName="interrupted", Key={"PK": partition, "SK": {"S": "app"}})
    found = cli("doctor", "--app", "billing")
    assert (found.code, states(found)["deletion"]) == (0, "warn")
    assert "-> anabranch apps delete billing" in found.out
    shown = cli("apps", "show", "billing")
    assert (shown.code, "'billing' was deleted, but rows of it are left" in shown.err) == (1, True)
    asked = cli("apps", "delete", "billing")
    assert (asked.code, "an earlier deletion of 'billing' left behind?" in asked.err) == (2, True)
    assert cli("apps", "delete", "billing", "--yes").out == "billing: deleted\n"
    assert client.scan(TableName="interrupted")["Items"] == []
    assert "there is no application 'billing'" in cli("apps", "delete", "billing", "--yes").err


def test_an_application_of_another_region_does_not_hide_the_others(server, cli, dynamodb):
    leases = dynamodb.leases("regions")
    for app in ("audit", "billing"):
        make_application(leases, app)
    dynamodb.boto3_client().update_item(
        TableName="regions",
        Key={"PK": {"S": "a#audit"}, "SK": {"S": "app"}},
        UpdateExpression="SET #region = :region",
        ExpressionAttributeNames={"#region": "region"},
        ExpressionAttributeValues={":region": {"S": "ap-south-1"}},
    )
    listed = cli("apps", "ls", "--leases", leases)
    assert listed.code == 1
    assert [line.split()[0] for line in listed.out.splitlines()] == ["APP", "audit", "billing"]
    assert "audit: application 'audit' uses DynamoDB table 'regions' in ap-south-1, not in" in listed.err
    audit, billing = cli("apps", "ls", "--leases", leases, "--json").json
    assert (audit["app"], "ap-south-1" in audit["error"], audit["streams"]) == ("audit", True, [])
    assert (billing["error"], billing["streams"]) == (None, ["orders"])


def test_an_unknown_table_is_named_and_not_created(server, cli, dynamodb):
    ended = cli("apps", "show", "billing", "--leases", dynamodb.leases("nowhere"))
    assert ended.code == 1
    assert "there is no application 'billing' in dynamodb://nowhere" in ended.err
    assert cli("apps", "ls", "--leases", dynamodb.leases("nowhere")).code == 0
    assert "nowhere" not in dynamodb.boto3_client().list_tables()["TableNames"]


def test_a_stopped_application_moves_from_its_file_to_dynamodb_without_loss_or_replay(
    server, cli, dynamodb, tmp_path, monkeypatch
):
    file, table = f"sqlite://{tmp_path}/leases.db", dynamodb.leases("moved")
    for number in range(10):
        server.call("PutRecord", StreamName="returns", PartitionKey="a", Data=str(number).encode())

    async def consume(leases, count):
        got = []
        async with Consumer("returns", app="billing", leases=leases, until="tip") as consumer:
            async for record in consumer:
                got.append(int(record.data))
                if len(got) == count:
                    break
        return got

    assert asyncio.run(consume(file, 4)) == [0, 1, 2, 3]
    ended = cli("apps", "copy", "billing", "--from", file, "--to", table)
    assert ended.code == 0
    assert ended.out == f"billing: moved to {table}, with 1 lease; from now on, workers start only there\n"
    with pytest.raises(LeaseStoreInvalidError, match="'billing' was moved to dynamodb://moved") as caught:
        asyncio.run(consume(file, 1))
    assert caught.value.code == "moved"
    # The record at which the loop was left had not been acknowledged.
    assert asyncio.run(consume(table, None)) == [3, 4, 5, 6, 7, 8, 9]
    assert "was moved to dynamodb://moved" in cli("explain", "billing", "--leases", file).out
    again = cli("apps", "copy", "billing", "--from", file, "--to", table)
    assert (again.code, "was moved to dynamodb://moved" in again.err) == (1, True)


def test_doctor_checks_the_table(server, cli, dynamodb):
    leases = dynamodb.leases("checked")
    ended = cli("doctor", "--leases", leases)
    assert ended.code == 0
    assert states(ended)["table"] == "warn"
    assert "the first worker creates it" in ended.out
    make_application(leases)
    before = dynamodb.boto3_client().scan(TableName="checked")["Items"]
    ended = cli("doctor", "--app", "billing", "--leases", leases)
    assert ended.code == 0
    found = states(ended)
    assert [found[name] for name in ("store", "latency", "table", "protection")] == ["ok"] * 4
    assert re.search(r"a read takes \d+\.\d ms \(the median of 5\)", ended.out)
    assert dynamodb.boto3_client().scan(TableName="checked")["Items"] == before
    dynamodb.boto3_client().update_table(TableName="checked", DeletionProtectionEnabled=False)
    assert "deletion protection is off" in cli("doctor", "--leases", leases).out


@pytest.mark.services
def test_dynamodb_local_has_no_recovery_and_nothing_has_to_be_allowed_for_it(server, cli, tmp_path):
    with dynamodb_local(tmp_path) as local:
        store = open_store(leases := local.leases("checked"), "billing")

        async def start():
            while True:
                try:
                    return await store.open(AppRow(app="billing", app_id="id", created_wall_ms=0))
                except LeaseStoreError:  # the table is being created
                    await asyncio.sleep(0.05)

        asyncio.run(start())
        assert [warning for warning in store.warnings if "the server does not support it (DynamoDB Local" in warning]
        ended = cli("doctor", "--app", "billing", "--leases", leases)
    assert states(ended)["protection"] == "skip"
    assert "nothing to do: the server does not support it" in ended.out


def test_doctor_names_a_table_that_belongs_to_kcl(server, cli, dynamodb):
    dynamodb.boto3_client().create_table(
        TableName="kcl-app",
        KeySchema=[{"AttributeName": "leaseKey", "KeyType": "HASH"}],
        AttributeDefinitions=[{"AttributeName": "leaseKey", "AttributeType": "S"}],
        BillingMode="PAY_PER_REQUEST",
    )
    ended = cli("doctor", "--app", "billing", "--leases", dynamodb.leases("kcl-app"))
    assert ended.code == 1
    assert "is the lease table of a KCL application: name another one" in ended.out
