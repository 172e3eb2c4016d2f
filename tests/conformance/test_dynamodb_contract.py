"""The DynamoDB store passes the contract of lease stores on moto, on AWS's DynamoDB Local and on the DynamoDB in memory
of the simulations; and the contract notices each condition that is left out.
"""

import pytest

from anabranch._aws.dynamodb_client import ItemWrite
from anabranch.stores.dynamodb import DynamoDbLeaseStore
from anabranch.testing.lease_store_contract import check_lease_store
from memory_dynamodb import MemoryClients, MemoryDynamoDb

from services import dynamodb_local, moto_dynamodb


@pytest.fixture(scope="module")
def moto():
    with moto_dynamodb() as server:
        yield server


@pytest.fixture(autouse=True)
def _credentials(monkeypatch):
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "x")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "y")


def store(server, app, kind=DynamoDbLeaseStore, **options):
    return kind(app, "contract", region="eu-west-1", endpoint_url=server.url, **options)


def snapshot_of(server):
    client = server.boto3_client()

    def rows():
        found = []
        for page in client.get_paginator("scan").paginate(TableName="contract"):
            found += page["Items"]
        return found

    def snapshot():
        kept = rows()

        def roll_back():
            for row in rows():
                client.delete_item(TableName="contract", Key={name: row[name] for name in ("PK", "SK")})
            for row in kept:
                client.put_item(TableName="contract", Item=row)

        return roll_back

    return snapshot


def test_the_store_keeps_the_contract_on_moto(moto):
    check_lease_store(lambda app: store(moto, app), slow=moto.stopped, snapshot=snapshot_of(moto))


@pytest.mark.services
def test_the_store_keeps_the_contract_on_dynamodb_local(tmp_path):
    with dynamodb_local(tmp_path) as server:
        check_lease_store(lambda app: store(server, app), slow=server.stopped, snapshot=snapshot_of(server))


def in_memory(database, app, kind=DynamoDbLeaseStore):
    made = kind(app)
    made.table._clients = MemoryClients(database)
    return made


def test_the_store_keeps_the_contract_in_memory():
    database = MemoryDynamoDb()

    def snapshot():
        kept = dict(database.tables["anabranch"])
        return lambda: database.tables.update(anabranch=kept)

    check_lease_store(lambda app: in_memory(database, app), snapshot=snapshot)


class LaxStore(DynamoDbLeaseStore):
    """One of its operations leaves out one of its conditions."""

    operation, left_out = "", ""

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.is_lax = False
        write = self.table.write

        async def lax_write(name, item_write: ItemWrite, *, repeatable=False):
            if self.is_lax:
                item_write.conditions = [text for text in item_write.conditions if self.left_out not in text]
            return await write(name, item_write, repeatable=repeatable)

        self.table.write = lax_write

    def _check_outcome(self, written, *, holds):
        """Here the contract must notice it, not the store itself."""


def lax(operation, left_out):
    async def perform(self, *arguments, **options):
        self.is_lax = True
        try:
            if operation == "delete_member":  # it also looks before it deletes
                await self.table.delete(ItemWrite(self._member_key(*arguments)))
            return await getattr(DynamoDbLeaseStore, operation)(self, *arguments, **options)
        finally:
            self.is_lax = False

    return type(f"Lax_{operation}", (LaxStore,), {operation: perform, "operation": operation, "left_out": left_out})


@pytest.mark.parametrize(
    "operation, left_out",
    [
        ("open", "PK"),
        ("record_incarnation", "#incarnation"),
        ("record_incarnation", "#app_id"),
        ("move_app", "#app_id"),
        ("move_app", "#place"),
        ("renew_watch", "#app_id"),
        ("delete_app", "#app_id"),
        ("register_member", "PK"),
        ("heartbeat", "#state"),
        ("heartbeat", "#counter"),
        ("seal_member", "#state"),
        ("seal_member", "#counter"),
        ("leave", "#state"),
        ("request_hand_off", "#state"),
        ("request_hand_off", "attribute_not_exists"),
        ("request_hand_off", "size"),
        ("delete_member", "#state"),
        ("write_status", "#revision"),
        ("put_stream", "PK"),
        ("write_stream", "#version"),
        ("create_lease", "PK"),
        ("take_lease", "#lease_count"),
        ("take_lease", "#lease_owner"),
        ("take_lease", "#completed"),
        ("take_lease", "#epoch"),
        ("write_lease", "#lease_count"),
        ("write_lease", "#lease_owner"),
        ("delete_lease", "#lease_count"),
        ("delete_lease", "#completed"),
        ("put_control", "PK"),
        ("write_control", "#state"),
    ],
)
def test_the_contract_notices_a_condition_that_is_left_out(operation, left_out):
    database, kind = MemoryDynamoDb(), lax(operation, left_out)
    with pytest.raises(ExceptionGroup, match="of the lease store contract do not hold"):
        check_lease_store(lambda app: in_memory(database, app, kind))
