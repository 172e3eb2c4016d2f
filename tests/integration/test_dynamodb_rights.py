"""The IAM policy and the CloudFormation template of the docs, against what the store really sends and creates."""

import asyncio
import json
import re
from pathlib import Path

import pytest
import yaml

from anabranch._cli.command_line import main as anabranch
from anabranch._model.leases import AppRow, MemberRow
from anabranch.stores.urls import open_store
from recording_proxy import RecordingProxy

from services import moto_dynamodb
from stream_world import Credentials, stream_world, until

PAGE = (Path(__file__).parents[2] / "docs" / "dynamodb.md").read_text()


def block(language, opening):
    found = re.search(rf"^```{language}\n({re.escape(opening)}.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    assert found is not None, f"docs/dynamodb.md has no {language} that begins with {opening!r}"
    return found[1]


def allowed():
    """The actions of each statement, by its Sid."""
    policy = json.loads(block("json", "{"))
    assert policy["Version"] == "2012-10-17"
    return {statement["Sid"]: set(statement["Action"]) for statement in policy["Statement"]}


@pytest.fixture(autouse=True)
def _credentials(monkeypatch):
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "x")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "y")


async def let_workers_work(leases, kinesis_port, world):
    """Two workers, a record, a split: the life of a fleet, except for what takes an hour."""
    from anabranch import Aws

    seen = []
    aws = Aws(
        region=world.kinesis.region, endpoint_url=f"http://127.0.0.1:{kinesis_port}", credentials=Credentials()
    )  # fmt: skip
    consumers = [world.consumer(app="billing", leases=leases, start="trim_horizon", aws=aws) for _ in range(2)]
    tasks = [asyncio.create_task(one.run(seen.append, handle_signals=False)) for one in consumers]
    world.put(["a"])
    await until(lambda: len(seen) == 1, "a record")
    world.split()
    world.put(["b", "c"])
    await until(lambda: len(seen) == 3, "three records")
    for consumer, task in zip(consumers, tasks, strict=True):
        await consumer.stop()
        await task


async def do_what_takes_an_hour(leases):
    """Members that ended long ago are deleted."""
    store = open_store(leases, "billing")
    await store.open(AppRow(app="billing", app_id="", created_wall_ms=0))
    await store.register_member(MemberRow(member_id="old", expiry_ms=10_000))
    await store.leave("old")
    assert await store.delete_member("old")
    await store.close()


def recorded(monkeypatch):
    """The operations of workers on DynamoDB and on Kinesis, and those of people at the command line."""

    async def work(server):
        async with stream_world(shards=1) as world:
            dynamodb = await RecordingProxy(server.port).start()
            kinesis = await RecordingProxy(int(world.kinesis.endpoint_url.rpartition(":")[2])).start()
            leases = f"dynamodb://?endpoint=http://127.0.0.1:{dynamodb.port}&region=eu-west-1"
            await let_workers_work(leases, kinesis.port, world)
            await do_what_takes_an_hour(leases)
            by_workers, dynamodb.operations = set(dynamodb.operations), type(dynamodb.operations)()
            for name, value in world.kinesis.environment().items():
                monkeypatch.setenv(name, value)
            for command in (
                ["apps", "ls", "--leases", leases],
                ["doctor", "orders", "--app", "billing", "--leases", leases],
                ["apps", "delete", "billing", "--leases", leases, "--yes"],
            ):
                await asyncio.to_thread(anabranch, command)
            await dynamodb.close()
            await kinesis.close()
            return by_workers, set(kinesis.operations), set(dynamodb.operations)

    with moto_dynamodb() as server:
        found = asyncio.run(work(server))
        tags = server.boto3_client().list_tags_of_resource
        assert tags(ResourceArn="arn:aws:dynamodb:eu-west-1:123456789012:table/anabranch")["Tags"]
    return found


def test_the_policy_allows_what_is_sent_and_nothing_else(monkeypatch, capsys):
    by_workers, of_kinesis, by_people = recorded(monkeypatch)
    policy = allowed()
    assert {f"kinesis:{name}" for name in of_kinesis} == policy["ReadTheStream"]
    # CreateTable with tags needs the right to tag, too.
    assert {f"dynamodb:{name}" for name in by_workers} | {"dynamodb:TagResource"} == (
        policy["ShareLeases"] | policy["CreateTheTable"]
    )
    assert policy["ShareLeases"].isdisjoint(policy["CreateTheTable"])
    assert {f"dynamodb:{name}" for name in by_people} == policy["ShareLeases"] | policy["ForOperators"]
    assert "table" in capsys.readouterr().out


def problems(template):
    from cfnlint.api import lint_all

    return [str(one) for one in lint_all(template) if one.rule.severity in {"error", "warning"}]


@pytest.mark.long
def test_the_template_passes_cfn_lint():
    text = block("yaml", "AWSTemplateFormatVersion")
    assert problems(text) == []
    assert problems(text.replace("KeyType: HASH", "KeyType: HASHED"))


def test_the_template_makes_the_table_that_the_store_makes():
    (table,) = yaml.safe_load(block("yaml", "AWSTemplateFormatVersion"))["Resources"].values()
    wanted = table["Properties"]

    async def create(server):
        store = open_store(server.leases("anabranch"), "billing")
        await store.open(AppRow(app="billing", app_id="id", created_wall_ms=0))
        await store.close()

    with moto_dynamodb() as server:
        asyncio.run(create(server))
        client = server.boto3_client()
        made = client.describe_table(TableName="anabranch")["Table"]
        backups = client.describe_continuous_backups(TableName="anabranch")["ContinuousBackupsDescription"]
        tags = client.list_tags_of_resource(ResourceArn=made["TableArn"])["Tags"]
    assert tags == wanted["Tags"]
    assert made["KeySchema"] == wanted["KeySchema"]
    assert made["AttributeDefinitions"] == wanted["AttributeDefinitions"]
    assert made["BillingModeSummary"]["BillingMode"] == wanted["BillingMode"]
    assert made["DeletionProtectionEnabled"] == wanted["DeletionProtectionEnabled"]
    recovery = backups["PointInTimeRecoveryDescription"]["PointInTimeRecoveryStatus"] == "ENABLED"
    assert recovery == wanted["PointInTimeRecoverySpecification"]["PointInTimeRecoveryEnabled"]
    assert table["DeletionPolicy"] == table["UpdateReplacePolicy"] == "Retain"
