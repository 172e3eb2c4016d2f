"""The DynamoDB table of lease stores: its reads and conditional writes, its creation, and what can be wrong with it.

Each call is sent once. An error of AWS becomes a lease store error with a code and advice. It knows no rows.
"""

import asyncio
import contextlib
import logging
import re
from collections.abc import Iterator
from typing import Any, Final, cast

from anabranch._aws.account import AwsAccount
from anabranch._aws.dynamodb_client import (
    DynamoDbByLoop,
    Item,
    ItemKey,
    ItemWrite,
    WriteOutcome,
    from_item,
    to_item,
)
from anabranch._aws.errors import CLOCK_CODES
from anabranch.config import Aws
from anabranch.errors import (
    AccessDeniedError,
    AnabranchError,
    CodecError,
    CredentialsError,
    ExpiredTokenError,
    InvalidRequestError,
    LeaseError,
    LeaseStoreError,
    LeaseStoreInvalidError,
    ResourceInUseError,
    ServiceError,
    StreamNotFoundError,
    ThrottledError,
    TransportError,
    UsageError,
)

_log = logging.getLogger(__name__)

_KEY_NAMES: Final = ("PK", "SK")
_KEY_KINDS: Final = ("HASH", "RANGE")
_TAGS: Final = ({"Key": "created-by", "Value": "anabranch"},)
WORKER_ACTIONS: Final = ("GetItem", "Query", "PutItem", "UpdateItem", "DeleteItem")
RECOVERY_TRIES_MAX: Final = 20
"""A start tries twice a second."""
_RECOVERY_NOT_READY: Final = "ContinuousBackupsUnavailableException"
_WRONG_KEY: Final = re.compile("key element does not match the schema|Missing the key", re.IGNORECASE)


class DynamoDbTable:
    def __init__(
        self,
        name: str,
        *,
        region: str | None = None,
        endpoint_url: str | None = None,
        may_create: bool = True,
        aws: Aws | None = None,
    ) -> None:
        self.name = name
        self.is_open = False
        self._may_create = may_create
        self._account = AwsAccount(aws)
        self._clients = DynamoDbByLoop(self._account, region, endpoint_url)
        self._identity: str | None = None
        """As last described; None after a call that no table answered."""
        self._has_created = False
        self._recovery_tries = 0
        self.warnings: list[str] = []
        """What could not be done for the table when it was created."""

    async def region(self) -> str:
        with self._translated():
            return (await self._clients.get()).region

    async def close(self) -> None:
        await self._clients.close()
        self._account.close()

    # rows

    async def get(self, key: ItemKey) -> Item | None:
        answer = await self.call("GetItem", {"Key": key.attributes(), "ConsistentRead": True})
        with self._translated():
            return from_item(answer["Item"]) if "Item" in answer else None

    async def query(self, partition: str, prefix: str = "") -> list[Item]:
        """All rows whose sort key has the prefix, the last ones first."""
        return [self.decoded(attributes) for attributes in await self.query_attributes(partition, prefix)]

    def decoded(self, attributes: Any) -> Item:
        with self._translated():
            return from_item(attributes)

    async def query_attributes(self, partition: str, prefix: str, *, unfinished: bool = False) -> list[Any]:
        """As they are stored; with `unfinished` those that are not `completed`."""
        names, values = {"#PK": "PK"}, {":partition": partition}
        body: dict[str, Any] = {"KeyConditionExpression": "#PK = :partition"}
        if prefix:
            names["#SK"], values[":prefix"] = "SK", prefix
            body["KeyConditionExpression"] += " AND begins_with(#SK, :prefix)"
        if unfinished:
            names["#completed"], values[":no"] = "completed", cast("Any", False)
            body["FilterExpression"] = "#completed = :no"
        body |= {
            "ExpressionAttributeNames": names,
            "ExpressionAttributeValues": to_item(values),
            "ConsistentRead": True,
            "ScanIndexForward": False,
        }
        return await self._pages("Query", body)

    async def scan(self, sort_key: str) -> list[Item]:
        """All rows with this sort key. It reads the whole table, so only the command line uses it."""
        found = await self._pages(
            "Scan",
            {
                "FilterExpression": "#SK = :sort",
                "ExpressionAttributeNames": {"#SK": "SK"},
                "ExpressionAttributeValues": to_item({":sort": sort_key}),
                "ConsistentRead": True,
            },
        )
        return [self.decoded(attributes) for attributes in found]

    async def put(self, key: ItemKey, item: Item) -> WriteOutcome:
        """Put if absent. Attributes that are None are left out."""
        write = ItemWrite(key)
        write.item = {name: value for name, value in item.items() if value is not None}
        write.when_absent("PK")
        return await self.write("PutItem", write)

    async def update(self, write: ItemWrite, *, repeatable: bool = False) -> WriteOutcome:
        return await self.write("UpdateItem", write, repeatable=repeatable)

    async def delete(self, write: ItemWrite) -> WriteOutcome:
        return await self.write("DeleteItem", write)

    async def write(self, operation: str, write: ItemWrite, *, repeatable: bool = False) -> WriteOutcome:
        with self._translated():
            client = await self._clients.get()
            return await client.write(operation, write.body(self.name), repeatable=repeatable)

    async def call(self, operation: str, body: dict[str, Any]) -> dict[str, Any]:
        with self._translated():
            client = await self._clients.get()
            return await client.call(operation, {"TableName": self.name} | body)

    async def _pages(self, operation: str, body: dict[str, Any]) -> list[Any]:
        found: list[Any] = []
        while True:
            answer = await self.call(operation, body)
            with self._translated():
                if not isinstance(items := answer.get("Items", []), list):
                    raise CodecError(f"{operation}: the answer has no list of Items")
            found += items
            if (last := answer.get("LastEvaluatedKey")) is None:
                return found
            body = body | {"ExclusiveStartKey": last}

    @contextlib.contextmanager
    def _translated(self) -> Iterator[None]:
        """Errors of AWS become those of a lease store. If no table answered, its identity is read again."""
        try:
            yield
        except asyncio.CancelledError:
            self._identity = None
            raise
        except (LeaseError, UsageError):
            raise
        except AnabranchError as error:
            if isinstance(error, TransportError | StreamNotFoundError):
                self._identity = None
            if isinstance(error, CredentialsError) and not self.is_open:
                raise
            raise _store_error(self.name, error) from error

    # checks

    async def denied_actions(self, partition: str) -> list[str]:
        """The actions of a worker that this identity may not perform. The writes have a condition that always fails.
        They name a row of this partition: a policy may allow only those of one application.
        """
        key = ItemKey(partition, "doctor")
        denied = []
        for action in WORKER_ACTIONS:
            write = ItemWrite(key)
            write.when("PK", "=", "a row that cannot exist")
            try:
                if action == "GetItem":
                    await self.get(key)
                elif action == "Query":
                    await self.query(key.partition, key.sort)
                else:
                    if action == "PutItem":
                        write.item = {}
                    elif action == "UpdateItem":
                        write.set("doctor", 1)
                    await self.write(action, write)
            except LeaseStoreError as error:
                if error.code != "access_denied":
                    raise
                denied.append(action)
        return denied

    async def is_recoverable(self) -> bool | None:
        """Whether point-in-time recovery is on; None if unknown."""
        try:
            answer = await self.call("DescribeContinuousBackups", {})
        except LeaseError:
            return None
        backups = answer.get("ContinuousBackupsDescription", {}).get("PointInTimeRecoveryDescription", {})
        return backups.get("PointInTimeRecoveryStatus") == "ENABLED" if backups else None

    # the table itself

    def forget_identity(self) -> None:
        """The rows are older than they should be: the table may be another one."""
        self._identity = None

    async def identity(self) -> str:
        """Which table it is. One that was deleted and created again, or restored, is another one."""
        if self._identity is None:
            description = await self.describe()
            if description is None:
                raise missing_table(self.name)
            self._check(description)
        assert self._identity is not None
        return self._identity

    async def describe(self) -> dict[str, Any] | None:
        """None if there is no such table."""
        try:
            answer = await self.call("DescribeTable", {})
        except LeaseStoreInvalidError as error:
            if error.code == "table_missing":
                return None
            raise
        with self._translated():
            if not isinstance(description := answer.get("Table"), dict):
                raise CodecError("DescribeTable: the answer has no Table")
            return description

    async def open(self) -> None:
        """Creates the table if there is none. Until it can be used, this raises `table_creating`."""
        try:
            description = await self.describe()
            if description is None:
                if not self._may_create:
                    raise missing_table(self.name)
                description = await self._create()
            self._check(description)
            if self._has_created:
                await self._enable_recovery()
                self._has_created = False
        except LeaseStoreError as error:
            if error.code == "access_denied":  # at a start, waiting does not help
                raise LeaseStoreInvalidError(str(error), code=error.code) from error
            raise
        self.is_open = True

    def _check(self, description: dict[str, Any]) -> None:
        check_key_schema(self.name, description)
        status = description.get("TableStatus")
        if status == "CREATING":
            raise self._creating()
        if status == "DELETING":
            raise LeaseStoreInvalidError(
                f"DynamoDB table {self.name!r} is being deleted",
                code="table_deleting",
                advice="restore it from a backup; to begin from scratch, start again when it is gone",
            )
        if status not in {"ACTIVE", "UPDATING"}:
            raise LeaseStoreInvalidError(
                f"DynamoDB table {self.name!r} is {status}", advice="it must be ACTIVE; check its encryption key"
            )
        identity = (description.get(part) for part in ("TableArn", "CreationDateTime", "TableId"))
        self._identity = " ".join(str(part) for part in identity if part is not None)

    def _creating(self) -> LeaseStoreError:
        return LeaseStoreError(
            f"DynamoDB table {self.name!r} is being created", code="table_creating", advice="this takes seconds"
        )

    async def _create(self) -> dict[str, Any]:
        """Workers that start together may all try: one of them creates the table, and the others find it."""
        body: dict[str, Any] = {
            "AttributeDefinitions": [{"AttributeName": name, "AttributeType": "S"} for name in _KEY_NAMES],
            "KeySchema": [
                {"AttributeName": name, "KeyType": kind} for name, kind in zip(_KEY_NAMES, _KEY_KINDS, strict=True)
            ],
            "BillingMode": "PAY_PER_REQUEST",
            "DeletionProtectionEnabled": True,
        }
        try:
            answer = await self._create_with_tags(body)
        except LeaseStoreError as error:
            if error.code == "access_denied":
                raise LeaseStoreInvalidError(
                    f"there is no DynamoDB table {self.name!r}, and it cannot be created ({error})",
                    code="access_denied",
                    advice="allow dynamodb:CreateTable, or create the table yourself (string keys PK and SK)",
                ) from error
            if error.code == "table_creating":  # by another worker, at the same moment
                raise self._creating() from error
            raise
        self._has_created = True
        _log.info("created DynamoDB table %s", self.name)
        return cast("dict[str, Any]", answer.get("TableDescription", {}))

    async def _create_with_tags(self, body: dict[str, Any]) -> dict[str, Any]:
        try:
            return await self.call("CreateTable", body | {"Tags": list(_TAGS)})
        except LeaseStoreError as error:
            if error.code != "access_denied" or "TagResource" not in str(error):
                raise
            self.warnings.append(f"DynamoDB table {self.name!r} is created without tags: {error}")
        return await self.call("CreateTable", body)

    async def _enable_recovery(self) -> None:
        """Without the right to do this, or on a server that does not know it, the table still works."""
        try:
            await self.call(
                "UpdateContinuousBackups",
                {"PointInTimeRecoverySpecification": {"PointInTimeRecoveryEnabled": True}},
            )
        except LeaseError as error:
            self._recovery_tries += 1
            if self._recovery_tries < RECOVERY_TRIES_MAX:  # the next try of the start repeats it
                if isinstance(error.__cause__, ServiceError) and error.__cause__.code == _RECOVERY_NOT_READY:
                    raise self._creating() from error
                if isinstance(error, LeaseStoreError) and error.code != "access_denied":
                    raise
            self.warnings.append(
                f"point-in-time recovery of DynamoDB table {self.name!r} was not enabled ({error}): enable it "
                "yourself, so that a deleted or damaged table can be restored"
            )


# Reasons


def check_key_schema(table: str, description: dict[str, Any]) -> None:
    keys = {key["KeyType"]: key["AttributeName"] for key in description.get("KeySchema", ())}
    types = {one["AttributeName"]: one["AttributeType"] for one in description.get("AttributeDefinitions", ())}
    if keys.get("HASH") == "leaseKey":
        raise LeaseStoreInvalidError(
            f"DynamoDB table {table!r} is the lease table of a KCL application",
            code="kcl_table",
            advice="name another one: leases='dynamodb://another-table'",
        )
    if keys != dict(zip(_KEY_KINDS, _KEY_NAMES, strict=True)) or any(types.get(name) != "S" for name in _KEY_NAMES):
        found = ", ".join(f"{name} ({kind}, {types.get(name, '?')})" for kind, name in keys.items())
        raise LeaseStoreInvalidError(
            f"DynamoDB table {table!r} has the key {found}; it must have PK (HASH, S) and SK (RANGE, S)",
            code="wrong_key_schema",
            advice="name another table, or let anabranch create one",
        )


def missing_table(table: str) -> LeaseStoreInvalidError:
    return LeaseStoreInvalidError(
        f"there is no DynamoDB table {table!r}",
        code="table_missing",
        advice="check its name, the region and the account; if it was deleted, restore it from a backup before you "
        "start a worker",
    )


def _store_error(table: str, error: AnabranchError) -> LeaseError:
    """The reason why a call failed, with a code and advice."""
    what = f"DynamoDB table {table!r}"
    if isinstance(error, ThrottledError):
        return LeaseStoreError(
            f"{what} is throttled ({error})",
            code="throttled",
            advice="use on-demand billing, or give it more read and write capacity",
        )
    if isinstance(error, ResourceInUseError) and error.code == "TransactionConflictException":
        return LeaseStoreError(
            f"{what}: another program changes a row in a transaction ({error})",
            advice="let no other program write to this table",
        )
    if isinstance(error, ResourceInUseError):
        return LeaseStoreError(
            f"{what} is being created or changed ({error})",
            code="table_creating",
            advice="wait until it is ACTIVE",
        )
    if isinstance(error, ExpiredTokenError) and error.code in CLOCK_CODES:
        return LeaseStoreError(
            f"{what}: this machine's clock is wrong ({error})",
            code="clock_skew",
            advice="synchronize it with NTP (chrony, systemd-timesyncd)",
        )
    if isinstance(error, AccessDeniedError | ExpiredTokenError | CredentialsError):
        return LeaseStoreError(
            f"{what}: access denied ({error})",
            code="access_denied",
            advice="compare the policy with the one in the documentation of the DynamoDB store",
        )
    if isinstance(error, StreamNotFoundError):
        return missing_table(table)
    if isinstance(error, InvalidRequestError) and _WRONG_KEY.search(error.message):
        return LeaseStoreInvalidError(
            f"{what} has another key than PK and SK ({error})", code="wrong_key_schema", advice="name another table"
        )
    if isinstance(error, InvalidRequestError):
        return LeaseStoreInvalidError(f"{what} rejected a request ({error})")
    return LeaseStoreError(f"{what} gave no answer ({error})")
