"""The DynamoDB store beyond the contract: its table, what people see in the console, and what can be wrong with it."""

import asyncio
import re

import pytest

from anabranch._core.leases.dialogue import TRIES_MAX
from anabranch._model.hash_keys import HashKeyRange
from anabranch._model.leases import (
    CHANGED_MAX,
    REQUESTS_MAX,
    WORKER_ID_BYTES_MAX,
    AppRow,
    Checkpoint,
    ControlRow,
    Finish,
    HandOffRequest,
    HeartbeatWrite,
    LeaseKey,
    LeaseRow,
    MemberRow,
    StreamRow,
)
from anabranch._model.streams import TRIM_HORIZON, Position
from anabranch.errors import (
    AccessDeniedError,
    ExpiredTokenError,
    InvalidRequestError,
    LeaseStoreError,
    LeaseStoreInvalidError,
    ResourceInUseError,
    StreamNotFoundError,
    ThrottledError,
    TransportError,
    UsageError,
)
from anabranch.stores.dynamodb import RECOVERY_TRIES_MAX, WORKER_ACTIONS, DynamoDbLeaseStore
from memory_dynamodb import MemoryClients, MemoryDynamoDb, item_bytes

APP = AppRow(app="billing", app_id="0123456789abcdef0123456789abcdef", created_wall_ms=1_700_000_000_123)
SHARD = LeaseKey("123456789012:orders:1700000000", 0, "shardId-000000000007")
SEQUENCE_NUMBER = 49590338271490256608559692538361571095921575989136588898


class ScriptedDynamoDb(MemoryDynamoDb):
    """Refuses operations with the errors that a test gives it, each as often as the list is long."""

    def __init__(self, **errors):
        super().__init__()
        self.errors = {name: list(given) for name, given in errors.items()}

    def _refuse(self, operation, body):
        for error in self.errors.get(operation, [])[:1]:
            del self.errors[operation][0]
            if not callable(error):
                raise error
            if (raised := error(body)) is not None:
                raise raised

    def perform(self, operation, body):
        self._refuse(operation, body)
        return super().perform(operation, body)

    def perform_write(self, operation, body):
        self._refuse(operation, body)
        return super().perform_write(operation, body)


def denied(operation, action=None):
    message = f"User: arn:aws:iam::1:user/me is not authorized to perform: dynamodb:{action or operation} on resource"
    return AccessDeniedError(message, operation=operation, code="AccessDeniedException")


def make(database, app="billing", **options):
    store = DynamoDbLeaseStore(app, **options)
    store.table._clients = MemoryClients(database)
    return store


def opened(database, **options):
    async def main():
        store = make(database, **options)
        await store.open(APP)
        return store

    return asyncio.run(main())


def failure(main):
    with pytest.raises((LeaseStoreError, LeaseStoreInvalidError)) as caught:
        asyncio.run(main)
    return caught.value


# the table


def test_the_table_is_created_once_with_string_keys_tags_and_protection():
    seen = []
    database = ScriptedDynamoDb(CreateTable=[seen.append])
    opened(database)
    (body,) = seen
    assert body["TableName"] == "anabranch"
    assert body["BillingMode"] == "PAY_PER_REQUEST"
    assert body["DeletionProtectionEnabled"] is True
    assert body["Tags"] == [{"Key": "created-by", "Value": "anabranch"}]
    assert database.requests["UpdateContinuousBackups"] == 1
    opened(database)
    assert database.requests["CreateTable"] == 1
    assert database.requests["UpdateContinuousBackups"] == 1


def test_without_the_right_to_tag_the_table_is_created_without_tags():
    database = ScriptedDynamoDb(CreateTable=[denied("CreateTable", "TagResource")])
    (warning,) = opened(database).warnings
    assert "created without tags" in warning
    assert "anabranch" in database.tables
    assert opened(database).warnings == []


def test_without_the_right_to_enable_recovery_the_store_works_and_says_so():
    store = opened(ScriptedDynamoDb(UpdateContinuousBackups=[denied("UpdateContinuousBackups")]))
    (warning,) = store.warnings
    assert "point-in-time recovery of DynamoDB table 'anabranch' was not enabled" in warning


def test_recovery_that_cannot_be_enabled_for_long_is_a_warning_too():
    not_ready = InvalidRequestError(
        "Backups are being enabled", operation="?", code="ContinuousBackupsUnavailableException"
    )
    database = ScriptedDynamoDb(UpdateContinuousBackups=[not_ready] * 1_000)
    store = make(database)
    for _ in range(RECOVERY_TRIES_MAX - 1):
        error = failure(store.open(APP))
        assert (type(error), error.code) == (LeaseStoreError, "table_creating")
    asyncio.run(store.open(APP))
    assert len(store.warnings) == 1
    assert RECOVERY_TRIES_MAX < TRIES_MAX / 2  # the start has time left


def test_without_the_right_to_create_a_missing_table_the_error_says_what_to_do():
    database = ScriptedDynamoDb(CreateTable=[denied("CreateTable")])
    error = failure(make(database).open(APP))
    assert isinstance(error, LeaseStoreInvalidError)
    assert error.code == "access_denied"
    assert "dynamodb:CreateTable" in str(error)
    assert "create the table yourself" in error.advice


def test_an_existing_table_needs_no_right_to_create_or_tag():
    database = ScriptedDynamoDb()
    opened(database)
    database.errors = {name: [denied(name)] * 9 for name in ("CreateTable", "TagResource", "UpdateContinuousBackups")}
    opened(database)


def test_another_worker_that_creates_the_table_at_the_same_moment_is_waited_for():
    database = ScriptedDynamoDb()
    made = make(database)

    def created_meanwhile(_):
        opened_by_another = {
            "TableName": "anabranch",
            "KeySchema": [{"AttributeName": "PK", "KeyType": "HASH"}, {"AttributeName": "SK", "KeyType": "RANGE"}],
            "AttributeDefinitions": [{"AttributeName": name, "AttributeType": "S"} for name in ("PK", "SK")],
        }
        MemoryDynamoDb.perform(database, "CreateTable", opened_by_another)

    database.errors["CreateTable"] = [created_meanwhile]
    error = failure(made.open(APP))
    assert (type(error), error.code) == (LeaseStoreError, "table_creating")
    assert asyncio.run(made.open(APP)).app_id == APP.app_id


def test_a_table_that_is_being_created_is_waited_for():
    database = ScriptedDynamoDb()
    opened(database)
    database.descriptions["anabranch"]["TableStatus"] = "CREATING"
    made = make(database)
    error = failure(made.open(APP))
    assert (type(error), error.code, error.retryable) == (LeaseStoreError, "table_creating", True)
    database.descriptions["anabranch"]["TableStatus"] = "ACTIVE"
    asyncio.run(made.open(APP))


@pytest.mark.parametrize(
    "status, code", [("DELETING", "table_deleting"), ("INACCESSIBLE_ENCRYPTION_CREDENTIALS", "unusable")]
)
def test_a_table_that_cannot_be_used_ends_the_start(status, code):
    database = ScriptedDynamoDb()
    opened(database)
    database.descriptions["anabranch"]["TableStatus"] = status
    error = failure(make(database).open(APP))
    assert (type(error), error.code, error.retryable) == (LeaseStoreInvalidError, code, False)
    assert error.advice


def keys(hash_key, range_key=None, kind="S"):
    names = [name for name in (hash_key, range_key) if name is not None]
    return {
        "KeySchema": [
            {"AttributeName": name, "KeyType": key} for name, key in zip(names, ("HASH", "RANGE"), strict=False)
        ],
        "AttributeDefinitions": [{"AttributeName": name, "AttributeType": kind} for name in names],
    }


@pytest.mark.parametrize(
    "schema, code, words",
    [
        (keys("leaseKey"), "kcl_table", "is the lease table of a KCL application: name another one"),
        (keys("PK"), "wrong_key_schema", "has the key PK (HASH, S); it must have PK (HASH, S) and SK (RANGE, S)"),
        (keys("SK", "PK"), "wrong_key_schema", "has the key SK (HASH, S), PK (RANGE, S)"),
        (keys("PK", "SK", "N"), "wrong_key_schema", "has the key PK (HASH, N), SK (RANGE, N)"),
        (keys("id", "SK"), "wrong_key_schema", "name another table, or let anabranch create one"),
    ],
)
def test_a_table_with_another_key_is_refused(schema, code, words):
    database = MemoryDynamoDb()
    database.perform("CreateTable", {"TableName": "anabranch", **schema})
    error = failure(make(database).open(APP))
    assert (type(error), error.code) == (LeaseStoreInvalidError, code)
    assert words in str(error)
    assert not database.tables["anabranch"]


def test_with_create_table_never_a_missing_table_is_an_error():
    database = MemoryDynamoDb()
    error = failure(make(database, create_table=False).open(APP))
    assert (type(error), error.code) == (LeaseStoreInvalidError, "table_missing")
    assert "restore it from a backup" in error.advice
    assert not database.tables


def test_looking_for_an_application_creates_no_table():
    database = MemoryDynamoDb()
    assert asyncio.run(make(database).read_app()) is None
    assert asyncio.run(make(database).applications()) == []
    assert not database.tables


def test_an_application_of_another_region_is_refused():
    database = MemoryDynamoDb()
    opened(database)
    database.region = "us-east-1"
    error = failure(make(database).open(APP))
    assert (type(error), error.code) == (LeaseStoreInvalidError, "other_region")
    assert "dynamodb://anabranch?region=eu-west-1" in error.advice


def test_leases_that_a_newer_version_spread_over_partitions_are_refused():
    database = MemoryDynamoDb()
    opened(database)
    database.tables["anabranch"]["a#billing", "app"]["lease_partitions"] = {"N": "4"}
    assert "upgrade this worker" in str(failure(make(database).open(APP)))


# reasons


@pytest.mark.parametrize(
    "error, kind, code",
    [
        (ThrottledError("slow down", operation="Query", code="ThrottlingException"), LeaseStoreError, "throttled"),
        (
            ThrottledError("slow", operation="Query", code="ProvisionedThroughputExceededException"),
            LeaseStoreError,
            "throttled",
        ),
        (denied("Query"), LeaseStoreError, "access_denied"),
        (ExpiredTokenError("old", operation="Query", code="ExpiredTokenException"), LeaseStoreError, "access_denied"),
        (
            ExpiredTokenError("Signature expired", operation="Query", code="InvalidSignatureException"),
            LeaseStoreError,
            "clock_skew",
        ),
        (TransportError("connection refused"), LeaseStoreError, "no_answer"),
        (
            ResourceInUseError("being changed", operation="Query", code="ResourceInUseException"),
            LeaseStoreError,
            "table_creating",
        ),
        (
            ResourceInUseError("ongoing", operation="Query", code="TransactionConflictException"),
            LeaseStoreError,
            "no_answer",
        ),
        (
            StreamNotFoundError("not found", operation="Query", code="ResourceNotFoundException"),
            LeaseStoreInvalidError,
            "table_missing",
        ),
    ],
)
def test_a_call_that_fails_is_sent_once_and_names_its_reason(error, kind, code):
    database = ScriptedDynamoDb()
    store = opened(database)
    database.errors["Query"] = [error]
    found = failure(store.poll())
    assert (type(found), found.code) == (kind, code)
    assert found.advice or code == "no_answer"
    assert "anabranch" in str(found)
    asyncio.run(store.poll())  # a second try, by the caller
    assert not database.errors["Query"]


def test_the_rights_of_a_worker_of_one_application_are_checked_with_its_own_keys():
    """With the condition on LeadingKeys that the docs recommend."""

    class OneApplication(MemoryDynamoDb):
        def _check(self, operation, body):
            partition = body.get("Key", body.get("Item", {})).get("PK")
            partition = body["ExpressionAttributeValues"][":partition"] if operation == "Query" else partition
            if partition is not None and not re.fullmatch("a#billing|[lv]#billing#.*", partition["S"]):
                raise denied(operation)

        def perform(self, operation, body):
            self._check(operation, body)
            return super().perform(operation, body)

        def perform_write(self, operation, body):
            self._check(operation, body)
            return super().perform_write(operation, body)

    database = OneApplication()
    store = opened(database)
    before = dict(database.tables["anabranch"])
    assert asyncio.run(store.denied_actions()) == []
    assert database.tables["anabranch"] == before
    assert asyncio.run(make(database, "audit").denied_actions()) == list(WORKER_ACTIONS)


def test_access_that_is_denied_at_the_start_ends_it():
    error = failure(make(ScriptedDynamoDb(DescribeTable=[denied("DescribeTable")])).open(APP))
    assert (type(error), error.code) == (LeaseStoreInvalidError, "access_denied")


@pytest.mark.parametrize("attribute, text", [("epoch", "many"), ("SK", "l#1:orders:1#first#shardId-000000000007")])
def test_a_row_that_cannot_be_read_is_named(attribute, text):
    database = MemoryDynamoDb()
    store = opened(database)
    asyncio.run(store.create_lease(LeaseRow(key=SHARD)))
    (lease,) = [item for key, item in database.tables["anabranch"].items() if key[1].startswith("l#")]
    lease[attribute] = {"S": text}
    error = failure(store.read_leases())
    assert "shardId-000000000007) of DynamoDB table 'anabranch' cannot be read" in str(error)


def test_a_store_is_opened_before_it_is_used():
    with pytest.raises(UsageError, match="dynamodb://anabranch is not open"):
        asyncio.run(make(MemoryDynamoDb()).poll())


# which table it is


def test_the_identity_is_asked_for_once_and_again_when_no_table_answered():
    database = ScriptedDynamoDb()
    store = opened(database)

    async def described_by(call):
        before = database.requests["DescribeTable"]
        await call()
        await store.identity()
        return database.requests["DescribeTable"] - before

    async def fail():
        with pytest.raises((LeaseStoreError, LeaseStoreInvalidError)):
            await store.poll()

    async def main():
        assert await described_by(store.poll) == 0
        database.errors["Query"] = [TransportError("cut off")]
        assert await described_by(fail) == 1
        database.errors["Query"] = [ThrottledError("slow", operation="Query", code="ThrottlingException")]
        assert await described_by(fail) == 0  # the table answered
        database.errors["Query"] = [StreamNotFoundError("?", operation="Query", code="ResourceNotFoundException")]
        assert await described_by(fail) == 1
        database.errors["Query"] = [lambda body: asyncio.CancelledError()]
        with pytest.raises(asyncio.CancelledError):
            await store.poll()
        assert await described_by(store.poll) == 1

    asyncio.run(main())


def test_a_table_that_was_restored_shows_in_the_heartbeat_and_in_the_identity():
    database = MemoryDynamoDb()
    store = opened(database)

    async def main():
        before = await store.identity()
        await store.register_member(MemberRow(member_id="a", expiry_ms=10_000))
        await store.heartbeat(HeartbeatWrite(member_id="a", attempt=3))
        kept = dict(database.tables["anabranch"])
        await store.heartbeat(HeartbeatWrite(member_id="a", attempt=4))
        database.tables["anabranch"] = kept
        database.descriptions["anabranch"] = database.descriptions["anabranch"] | {"CreationDateTime": 99}
        answer = await store.heartbeat(HeartbeatWrite(member_id="a", attempt=5))
        assert answer.counter_before == 3
        assert await store.identity() != before

    asyncio.run(main())


def test_a_table_that_was_deleted_ends_the_worker_and_one_that_was_created_again_has_no_application():
    database = MemoryDynamoDb()
    store = opened(database)
    asyncio.run(store.register_member(MemberRow(member_id="a", expiry_ms=10_000)))
    before = asyncio.run(store.identity())
    database.perform("DeleteTable", {"TableName": "anabranch"})
    error = failure(store.heartbeat(HeartbeatWrite(member_id="a", attempt=1)))
    assert (type(error), error.code) == (LeaseStoreInvalidError, "table_missing")
    opened(database)
    assert asyncio.run(store.identity()) != before
    del database.tables["anabranch"]["a#billing", "app"]
    poll = asyncio.run(store.poll())
    assert (poll.app, poll.members) == (None, ())


# what people see


def test_rows_are_readable_in_the_console():
    database = MemoryDynamoDb()
    store = opened(database)

    async def main():
        await store.register_member(MemberRow(member_id="host:1#ab", expiry_ms=10_000, streams=("Xy12_z",)))
        await store.put_stream(
            StreamRow(stream_key=SHARD.stream_key, name="orders", arn="arn", created_seconds=1.5, origin=TRIM_HORIZON)
        )
        await store.create_lease(LeaseRow(key=SHARD, hash_key_range=HashKeyRange(0, 9)))
        await store.take_lease(SHARD, "host:1#ab", expected_owner=None, expected_version=0)
        row = LeaseRow(
            key=SHARD,
            hash_key_range=HashKeyRange(0, 9),
            owner="host:1#ab",
            epoch=1,
            checkpoint=Checkpoint(watermark=Position(SEQUENCE_NUMBER, 3)),
            records_handled=12,
            checkpointed_at_wall_ms=1_700_000_000_500,
        )
        await store.write_lease(row, member_id="host:1#ab", expected_version=1)
        await store.put_control(ControlRow(command_id="1", action="pause"))

    asyncio.run(main())
    seen = {
        key: {name: next(iter(value.values())) for name, value in item.items() if name not in {"PK", "SK"}}
        for key, item in database.tables["anabranch"].items()
    }
    assert seen == {
        ("a#billing", "app"): {
            "app_name": "billing",
            "app_id": APP.app_id,
            "created_timestamp": "2023-11-14T22:13:20.123Z",
            "incarnation": "arn:aws:dynamodb:eu-west-1:123456789012:table/anabranch 1",
            "place": "here",
            "region": "eu-west-1",
            "lease_partitions": "1",
        },
        ("a#billing", f"m#{APP.app_id}#host:1#ab"): {
            "counter": "0",
            "state": "live",
            "expiry_ms": "10000",
            "protocol": "1.0",
            "streams": "Xy12_z",
            "wanted": {},
        },
        (f"l#billing#{APP.app_id}", "s#123456789012:orders:1700000000"): {
            "app_name": "billing",
            "stream_name": "orders",
            "arn": "arn",
            "created_seconds": "1.5",
            "version": "0",
        },
        (f"l#billing#{APP.app_id}", "l#123456789012:orders:1700000000#0#shardId-000000000007"): {
            "app_name": "billing",
            "stream_name": "orders",
            "shard_id": "shardId-000000000007",
            "lease_owner": "host:1#ab",
            "lease_count": "2",
            "checkpoint": f"{SEQUENCE_NUMBER}:3",
            "checkpoint_timestamp": "2023-11-14T22:13:20.500Z",
            "records_processed": "12",
            "completed": False,
            "epoch": "1",
            "hash_key_range": "0-9",
        },
        (f"v#billing#{APP.app_id}", "c#1"): {"action": "pause", "state": "pending"},
        ("a#billing", f"c#{APP.app_id}#1"): {},
    }


def test_a_heartbeat_costs_one_write_unit_with_all_requests_and_changes():
    database = MemoryDynamoDb()
    store = opened(database)
    keys_of = [LeaseKey(f"123456789012:{'s' * 128}:1700000000", 9, f"shardId-{n:012d}") for n in range(CHANGED_MAX)]
    member_id = f"{'w' * WORKER_ID_BYTES_MAX}#{'f' * 32}"
    member = MemberRow(
        member_id=member_id,
        counter=10**9,
        expiry_ms=10_000,
        order="none",
        streams=tuple(f"{number:06}" for number in range(25)),
        shards_max=1_000,
        joined_wall_ms=1_700_000_000_123,
        wanted=tuple(HandOffRequest(key, member_id).short_name for key in keys_of[:REQUESTS_MAX]),
    )

    async def main():
        await store.register_member(member)
        await store.heartbeat(
            HeartbeatWrite(
                member_id=member_id,
                attempt=10**9 + 1,
                load=1_000,
                change_count=10**6,
                changed=tuple(key.short_name for key in keys_of),
                reads_healthy=False,
                draining=True,
            )
        )

    asyncio.run(main())
    assert not database.large_writes
    (size,) = [item_bytes(item) for key, item in database.tables["anabranch"].items() if key[1].startswith("m#")]
    assert size <= 1024


def test_a_finished_lease_is_small():
    database = MemoryDynamoDb()
    store = opened(database)
    full = LeaseRow(
        key=SHARD,
        hash_key_range=HashKeyRange(2**127, 2**128 - 1),
        owner="host:1#0123456789abcdef0123456789abcdef",
        epoch=3,
        checkpoint=Checkpoint(watermark=Position(SEQUENCE_NUMBER), seen_through_seconds=1_700_000_000.5),
        records_handled=10**6,
        checkpointed_at_wall_ms=1_700_000_000_500,
    )

    async def main():
        await store.create_lease(full)
        (before,) = sizes()
        done = LeaseRow(
            key=SHARD,
            hash_key_range=full.hash_key_range,
            epoch=3,
            checkpoint=full.checkpoint,
            records_handled=full.records_handled,
            checkpointed_at_wall_ms=full.checkpointed_at_wall_ms,
            finish=Finish("end", ("shardId-000000000008", "shardId-000000000009")),
        )
        await store.write_lease(done, member_id=full.owner, expected_version=0)
        (after,) = sizes()
        return before, after

    def sizes():
        return [item_bytes(item) for key, item in database.tables["anabranch"].items() if key[1].startswith("l#")]

    before, after = asyncio.run(main())
    assert before <= 1024
    assert after < before
    assert after <= 500  # of which 100 are its key, 100 its hash key range and 100 its position


# commands


def test_a_command_that_was_answered_is_not_asked_again():
    """The sender repeats it because its answer was lost; the worker's own clean-up was cut off."""
    database = ScriptedDynamoDb()
    store = opened(database)
    command = ControlRow(command_id="1", action="pause")

    async def main():
        await store.put_control(command)
        assert [row.command_id for row in (await store.poll()).commands] == ["1"]
        database.errors["DeleteItem"] = [TransportError("cut off")]
        with pytest.raises(LeaseStoreError):
            await store.write_control(ControlRow(command_id="1", action="pause", state="applied"))
        await store.put_control(command)
        assert not (await store.poll()).commands
        assert ("a#billing", f"c#{APP.app_id}#1") not in database.tables["anabranch"]
        assert [row.state for row in await store.read_controls()] == ["applied"]

    asyncio.run(main())


def test_applications_are_listed_by_name():
    database = MemoryDynamoDb()
    for name in ("b", "a", "c d"):
        asyncio.run(make(database, name).open(AppRow(app=name, app_id=name, created_wall_ms=0)))
    assert asyncio.run(make(database).applications()) == ["a", "b", "c d"]
