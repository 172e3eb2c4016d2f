"""The table as the store creates it, on servers: moto knows tags and recovery, DynamoDB Local protection and races."""

import asyncio

import pytest
from botocore.exceptions import ClientError

from anabranch._model.leases import AppRow, MemberRow
from anabranch.errors import LeaseStoreError, LeaseStoreInvalidError
from anabranch.stores.urls import open_store

from services import dynamodb_local, moto_dynamodb


@pytest.fixture(autouse=True)
def _credentials(monkeypatch):
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "x")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "y")


async def opened(leases, app="billing"):
    store = open_store(leases, app)
    while True:
        try:
            await store.open(AppRow(app=app, app_id="id", created_wall_ms=0))
        except LeaseStoreError as error:
            if error.code != "table_creating":
                raise
            await asyncio.sleep(0.05)
        else:
            return store


async def open_together(leases, count):
    stores = await asyncio.gather(*(opened(leases) for _ in range(count)))
    rows = [await store.read_app() for store in stores]
    for store in stores:
        await store.close()
    return rows


def test_workers_that_start_together_create_one_table_with_tags_recovery_and_protection():
    with moto_dynamodb() as server:
        rows = asyncio.run(open_together(server.leases("fleet"), 6))
        assert rows == [rows[0]] * 6
        client = server.boto3_client()
        table = client.describe_table(TableName="fleet")["Table"]
        assert table["BillingModeSummary"]["BillingMode"] == "PAY_PER_REQUEST"
        assert table["DeletionProtectionEnabled"] is True
        assert client.list_tags_of_resource(ResourceArn=table["TableArn"])["Tags"] == [
            {"Key": "created-by", "Value": "anabranch"}
        ]
        backups = client.describe_continuous_backups(TableName="fleet")["ContinuousBackupsDescription"]
        assert backups["PointInTimeRecoveryDescription"]["PointInTimeRecoveryStatus"] == "ENABLED"


@pytest.mark.services
def test_workers_that_start_together_create_one_table_on_dynamodb_local(tmp_path):
    with dynamodb_local(tmp_path) as server:
        rows = asyncio.run(open_together(server.leases("fleet"), 6))
        assert rows == [rows[0]] * 6
        client = server.boto3_client()
        with pytest.raises(ClientError, match="protected against deletion"):
            client.delete_table(TableName="fleet")


@pytest.mark.services
def test_a_table_that_is_deleted_and_created_again_is_another_one(tmp_path):
    async def main(server, client):
        store = await opened(server.leases("fleet"))
        before = await store.identity()
        await store.register_member(MemberRow(member_id="a", expiry_ms=10_000))
        client.update_table(TableName="fleet", DeletionProtectionEnabled=False)
        client.delete_table(TableName="fleet")
        with pytest.raises(LeaseStoreInvalidError, match="there is no DynamoDB table 'fleet'") as caught:
            await store.poll()
        assert caught.value.code == "table_missing"
        again = await opened(server.leases("fleet"), "another")
        assert await store.identity() != before
        assert (await store.poll()).app is None
        await again.close()
        await store.close()

    with dynamodb_local(tmp_path) as server:
        asyncio.run(main(server, server.boto3_client()))


@pytest.mark.services
def test_rows_outlive_the_server(tmp_path):
    async def main(server):
        store = await opened(server.leases())
        await store.register_member(MemberRow(member_id="a", expiry_ms=10_000))
        before = await store.identity()
        server.kill()
        with pytest.raises(LeaseStoreError) as caught:
            await store.poll()
        assert caught.value.code == "no_answer"
        server.start()
        assert [row.member_id for row in (await store.poll()).members] == ["a"]
        assert await store.identity() == before
        await store.close()

    with dynamodb_local(tmp_path) as server:
        asyncio.run(main(server))


@pytest.mark.parametrize("kind", ["leaseKey", "PK"])
def test_a_foreign_table_is_named(kind):
    with moto_dynamodb() as server:
        server.boto3_client().create_table(
            TableName="fleet",
            KeySchema=[{"AttributeName": kind, "KeyType": "HASH"}],
            AttributeDefinitions=[{"AttributeName": kind, "AttributeType": "S"}],
            BillingMode="PAY_PER_REQUEST",
        )

        async def main():
            store = open_store(server.leases("fleet"), "billing")
            for look in (store.read_app, store.identity):
                with pytest.raises(LeaseStoreInvalidError) as caught:
                    await look()
                assert caught.value.code == {"leaseKey": "kcl_table", "PK": "wrong_key_schema"}[kind]
            await store.close()

        asyncio.run(main())
