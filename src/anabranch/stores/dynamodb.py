"""The lease store on Amazon DynamoDB: for fleets on several machines.

One table holds the rows of many applications. Its key is `PK` and `SK`:

    PK                    SK                                what
    a#<app>               app                               the application
    a#<app>               m#<app_id>#<member>               its members
    a#<app>               c#<app_id>#<command>              which commands are pending
    a#<app>               d#<app_id>                        which deletions have not ended
    l#<app>#<app_id>      s#<stream>                        its streams
    l#<app>#<app_id>      l#<stream>#<generation>#<shard>   its leases
    v#<app>#<app_id>      m#<member>                        what members report about their shards
    v#<app>#<app_id>      c#<command>                       its commands

A poll is one query of the first partition (rule R1). Each operation is one conditional write, sent once. DynamoDB
returns the previous row; the new one is computed with the functions that all stores share. A command's state is in the
third partition; its row in the first only tells the workers that it is pending.

An error of AWS becomes a lease store error with a code and advice.

It decides nothing about leases, and has no clock. It does not know the engine.
"""

import asyncio
import contextlib
import logging
import re
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Final, Generic, TypeVar, cast

from msgspec.structs import replace

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
from anabranch._core.leases import rows
from anabranch._model.leases import (
    REQUESTS_MAX,
    AppRow,
    Conflict,
    ControlRow,
    HeartbeatAnswer,
    HeartbeatWrite,
    LeaseKey,
    LeaseRow,
    LeaseRows,
    MemberRow,
    Place,
    Poll,
    StatusRow,
    StreamRow,
)
from anabranch._ports import LeaseStore
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
from anabranch.stores.row_codec import CODECS, parse_timestamp, timestamp
from anabranch.stores.row_store import Kind, Row, requested, write_all

_log = logging.getLogger(__name__)

DEFAULT_TABLE: Final = "anabranch"
_CHECKPOINT_SECONDS: Final = 10.0
"""Each commit of a shard costs a write."""
_LEASE_PARTITIONS: Final = 1
"""How many partition keys the leases of an application are spread over."""

R = TypeVar("R", bound=Row)
T = TypeVar("T")


# Rows as items


_RENAMED: Final = {
    "app": "app_name",
    "id": "app_id",
    "owner": "lease_owner",
    "records_handled": "records_processed",
    "checkpointed_wall_ms": "checkpoint_timestamp",
    "created_wall_ms": "created_timestamp",
    "joined_wall_ms": "joined_timestamp",
    "requested_wall_ms": "requested_timestamp",
    "stopped_wall_ms": "stopped_timestamp",
    "name": "stream_name",
}
"""Columns whose attributes have the names that people know from KCL, or plainer ones."""
_BOOLEANS: Final = frozenset({"bootstrapped", "completed", "draining", "paused", "reads_healthy"})
_ALWAYS: Final = frozenset({"completed", "count", "counter", "epoch", "incarnation", "place", "revision", "state"})
"""Columns that conditions compare: stored even if they have their default."""
_NOT_FIELDS: Final = frozenset(
    {"PK", "SK", "app_name", "stream_name", "shard_id", "region", "lease_partitions", "requests_made", "wanted"}
)
"""Attributes that are not fields of a row: the key, names for people, and values of this store only."""


class _Shape(Generic[R]):
    """How rows of one kind become items. Fields with their default are not stored. Those of a newer version stay."""

    def __init__(
        self,
        kind: Kind,
        in_key: tuple[str, ...] = (),
        key: Callable[[Item], tuple[str | int, ...]] = lambda _: (),
        *,
        count: str = "",
    ) -> None:
        """`key` reads the columns `in_key`, which have no attribute of their own. `count`: the version's attribute."""
        renamed = _RENAMED | {"count": count}
        self._codec = CODECS[kind]
        self._in_key, self._key = in_key, key
        self._fields = {name: renamed.get(name, name) for name in self._codec.columns if name not in in_key}
        self._defaults = self._codec.defaults
        self._known = {*self._fields.values(), *_NOT_FIELDS}

    def values(self, row: R) -> dict[str, Any]:
        """The attributes of all fields; None where the field has its default."""
        column = self._codec.fields(row)
        found = {}
        for name, attribute in self._fields.items():
            value = column[name]
            if value == self._defaults[name] and name not in _ALWAYS:
                value = None
            elif name in _BOOLEANS:
                value = bool(value)
            elif name.endswith("_wall_ms") and value is not None:
                value = timestamp(value)
            found[attribute] = value
        return found

    def row(self, item: Item) -> R:
        column = self._defaults | dict(zip(self._in_key, self._key(item), strict=True))
        for name, attribute in self._fields.items():
            value = item.get(attribute)
            if value is not None:
                if name in _BOOLEANS:
                    value = int(value)
                elif name.endswith("_wall_ms"):
                    value = parse_timestamp(value)
                column[name] = value
        extra = {name: value for name, value in item.items() if name not in self._known}
        return cast("R", self._codec.row(column, extra))


def _name(item: Item) -> tuple[str]:
    return (str(item["SK"]).partition("#")[2],)


def _lease_name(item: Item) -> tuple[str, int, str]:
    stream_key, generation, shard_id = str(item["SK"]).removeprefix("l#").rsplit("#", 2)
    return stream_key, int(generation), shard_id


def _member_name_and_wanted(item: Item) -> tuple[str, str]:
    number_of = item.get("wanted", {})
    return str(item["SK"]).split("#", 2)[2], " ".join(sorted(number_of, key=number_of.__getitem__))


_APP: Final = _Shape[AppRow]("app")
_STREAM: Final = _Shape[StreamRow]("stream", ("stream",), _name, count="version")
_LEASE: Final = _Shape[LeaseRow]("lease", ("stream", "generation", "shard"), _lease_name, count="lease_count")
_MEMBER: Final = _Shape[MemberRow]("member", ("member", "wanted"), _member_name_and_wanted)
_STATUS: Final = _Shape[StatusRow]("status", ("member",), _name)
_COMMAND: Final = _Shape[ControlRow]("command", ("command",), _name)


_HEARTBEAT_FIELDS: Final = ("counter", "load", "change_count", "changed", "reads_healthy", "draining")


def _heartbeat_values(write: HeartbeatWrite) -> dict[str, Any]:
    """The attributes that a heartbeat writes, besides the answered requests."""
    blank = MemberRow(member_id=write.member_id, expiry_ms=0, counter=write.attempt - 1)
    row = rows.heartbeat(blank, write)
    assert row is not None
    values = _MEMBER.values(row)
    return {name: values[name] for name in _HEARTBEAT_FIELDS}


# The table

_KEY_SCHEMA: Final = {"HASH": "PK", "RANGE": "SK"}
_TAGS: Final = ({"Key": "created-by", "Value": "anabranch"},)
WORKER_ACTIONS: Final = ("GetItem", "Query", "PutItem", "UpdateItem", "DeleteItem")
RECOVERY_TRIES_MAX: Final = 20
"""A start tries twice a second."""
_RECOVERY_NOT_READY: Final = "ContinuousBackupsUnavailableException"
_WRONG_KEY: Final = re.compile("key element does not match the schema|Missing the key", re.IGNORECASE)


class DynamoDbTable:
    def __init__(
        self, name: str, *, region: str | None, endpoint_url: str | None, may_create: bool, aws: Aws | None
    ) -> None:
        self.name = name
        self.is_open = False
        self._may_create = may_create
        self._account = AwsAccount(aws)
        self._clients = DynamoDbByLoop(self._account, region, endpoint_url)
        self._identity: str | None = None
        """From the last DescribeTable; None after a call that no table answered."""
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
        return self.decoded(answer["Item"]) if "Item" in answer else None

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
        body = {
            "FilterExpression": "#SK = :sort",
            "ExpressionAttributeNames": {"#SK": "SK"},
            "ExpressionAttributeValues": to_item({":sort": sort_key}),
            "ConsistentRead": True,
        }
        return [self.decoded(attributes) for attributes in await self._pages("Scan", body)]

    async def put(self, key: ItemKey, item: Item) -> Item | None:
        """Puts a row without the attributes that are None. If there is one already, it stays and is returned."""
        write = ItemWrite(key, where={"PK": None})
        write.item = {name: value for name, value in item.items() if value is not None}
        written = await self.write("PutItem", write)
        if written.holds:
            return None
        if written.before is None:
            raise LeaseStoreInvalidError(
                "the DynamoDB server does not return the row of a failed condition "
                "(ReturnValuesOnConditionCheckFailure)",
                advice="use AWS's own DynamoDB or DynamoDB Local",
            )
        return written.before

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

    async def is_recoverable(self) -> bool | None:
        """Whether point-in-time recovery is on; None if the answer does not say. Raises `LeaseError`."""
        answer = await self.call("DescribeContinuousBackups", {})
        backups = answer.get("ContinuousBackupsDescription", {}).get("PointInTimeRecoveryDescription", {})
        return backups.get("PointInTimeRecoveryStatus") == "ENABLED" if backups else None

    # the table itself

    def forget_identity(self) -> None:
        """The rows are older than they should be: the table may be another one."""
        self._identity = None

    async def identity(self) -> str:
        """Identifies the table. One that was restored, or deleted and created again, has another identity."""
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
            "AttributeDefinitions": [{"AttributeName": name, "AttributeType": "S"} for name in _KEY_SCHEMA.values()],
            "KeySchema": [{"AttributeName": name, "KeyType": kind} for kind, name in _KEY_SCHEMA.items()],
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
            table = f"DynamoDB table {self.name!r}"
            self.warnings.append(
                f"{table} has no point-in-time recovery: the server does not support it (DynamoDB Local does not)"
                if has_no_recovery(error)
                else f"point-in-time recovery of {table} was not enabled ({error}): enable it yourself, so that a "
                "deleted or damaged table can be restored"
            )


# Reasons


def has_no_recovery(error: LeaseError) -> bool:
    """Whether the server does not know the calls for point-in-time recovery."""
    return isinstance(error.__cause__, ServiceError) and error.__cause__.code == "UnknownOperationException"


def check_key_schema(table: str, description: dict[str, Any]) -> None:
    keys = {key["KeyType"]: key["AttributeName"] for key in description.get("KeySchema", ())}
    types = {one["AttributeName"]: one["AttributeType"] for one in description.get("AttributeDefinitions", ())}
    if keys.get("HASH") == "leaseKey":
        raise LeaseStoreInvalidError(
            f"DynamoDB table {table!r} is the lease table of a KCL application",
            code="kcl_table",
            advice="name another one: leases='dynamodb://another-table'",
        )
    if keys != _KEY_SCHEMA or any(types.get(name) != "S" for name in keys.values()):
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
    policy = "compare the policy with the one in the documentation of the DynamoDB store"
    if (refused := access_error(what, error, policy)) is not None:
        return refused
    if isinstance(error, StreamNotFoundError):
        return missing_table(table)
    if isinstance(error, InvalidRequestError) and _WRONG_KEY.search(error.message):
        return LeaseStoreInvalidError(
            f"{what} has another key than PK and SK ({error})", code="wrong_key_schema", advice="name another table"
        )
    if isinstance(error, InvalidRequestError):
        return LeaseStoreInvalidError(f"{what} rejected a request ({error})")
    return LeaseStoreError(f"{what} gave no answer ({error})")


def access_error(what: str, error: AnabranchError, policy: str) -> LeaseStoreError | None:
    """Why AWS refuses the caller, with the advice for its policy; None if that is not the reason."""
    if isinstance(error, ExpiredTokenError) and error.code in CLOCK_CODES:
        return LeaseStoreError(
            f"{what}: this machine's clock is wrong ({error})",
            code="clock_skew",
            advice="synchronize it with NTP (chrony, systemd-timesyncd)",
        )
    if isinstance(error, AccessDeniedError | ExpiredTokenError | CredentialsError):
        return LeaseStoreError(f"{what}: access denied ({error})", code="access_denied", advice=policy)
    return None


# The store


class DynamoDbLeaseStore(LeaseStore):
    """Leases in a DynamoDB table, for workers on any number of machines. Several applications can share a table.

    `endpoint_url` is for DynamoDB Local. Without `region`, the standard AWS chain decides.
    """

    checkpoint_interval = _CHECKPOINT_SECONDS

    def __init__(
        self,
        app: str,
        table: str = DEFAULT_TABLE,
        *,
        region: str | None = None,
        endpoint_url: str | None = None,
        create_table: bool = True,
        aws: Aws | None = None,
    ) -> None:
        self.app = app
        self.table = DynamoDbTable(table, region=region, endpoint_url=endpoint_url, may_create=create_table, aws=aws)
        self.warnings = self.table.warnings
        self._shown = f"dynamodb://{table}" + (f"?region={region}" if region else "")
        self._app_id: str | None = None
        self._counters: dict[str, int] = {}
        """The last acknowledged heartbeat of each member of this process."""
        self._leases_read: dict[str, tuple[Any, LeaseRow]] = {}
        """Leases by sort key, as they were last read: their attributes, and the row."""

    def __str__(self) -> str:
        return self._shown

    async def close(self) -> None:
        await self.table.close()

    async def identity(self) -> str:
        return await self.table.identity()

    async def denied_actions(self) -> list[str]:
        """The actions of a worker that this identity may not perform. Writes nothing: the conditions always fail. Names
        a row of this application, because a policy may allow only those.
        """
        key = ItemKey(self._app_key.partition, "doctor")
        denied = []
        for action in WORKER_ACTIONS:
            values = {"doctor": 1} if action == "UpdateItem" else {}
            write = ItemWrite(key, values, where={"PK": "a row that cannot exist"})
            try:
                if action == "GetItem":
                    await self.table.get(key)
                elif action == "Query":
                    await self.table.query(key.partition, key.sort)
                else:
                    write.item = {} if action == "PutItem" else None
                    await self.table.write(action, write)
            except LeaseStoreError as error:
                if error.code != "access_denied":
                    raise
                denied.append(action)
        return denied

    async def applications(self) -> list[str]:
        """The applications of the table, sorted. Reads the whole table; creates nothing."""
        if await self.table.describe() is None:
            return []
        return sorted(str(item["PK"]).removeprefix("a#") for item in await self.table.scan("app"))

    # the application

    async def open(self, app: AppRow) -> AppRow:
        if app.app != self.app:
            raise UsageError(f"this lease store was made for application {self.app!r}, not for {app.app!r}")
        await self.table.open()
        item = await self.table.get(self._app_key)
        if item is None:
            made = replace(app, incarnation=await self.identity())
            region = await self.table.region()
            item = _APP.values(made) | made.extra | {"region": region, "lease_partitions": _LEASE_PARTITIONS}
            item = await self.table.put(self._app_key, item) or item
        row = self._row(_APP, item)
        self._check_place(item, await self.table.region())
        self._app_id = row.app_id
        return row

    def _check_place(self, item: Item, region: str) -> None:
        """All workers must use one region: the replicas of a global table see each other's writes late."""
        if (recorded := item.get("region", region)) != region:
            raise LeaseStoreInvalidError(
                f"application {self.app!r} uses DynamoDB table {self.table.name!r} in {recorded}, not in {region}",
                code="other_region",
                advice=f"write leases='dynamodb://{self.table.name}?region={recorded}' for all its workers: a global "
                "table shows writes of another region late, so that two workers could own a shard",
            )
        if (partitions := item.get("lease_partitions", _LEASE_PARTITIONS)) != _LEASE_PARTITIONS:
            raise LeaseStoreInvalidError(
                f"application {self.app!r} spreads its leases over {partitions} partitions, which a newer anabranch "
                "wrote",
                advice="upgrade this worker",
            )

    async def read_app(self) -> AppRow | None:
        try:
            item = await self.table.get(self._app_key)
        except LeaseStoreInvalidError as error:
            if error.code == "table_missing":
                return None
            if error.code == "wrong_key_schema":
                await self.identity()  # says what table it is
            raise
        return None if item is None else self._row(_APP, item)

    async def poll(self) -> Poll:
        app_id = self._opened
        # The application's row comes last: if it is another application's, the caller ignores the other rows.
        items = await self.table.query(f"a#{self.app}")
        app, members, pending = None, [], []
        for item in items:
            kind, _, rest = str(item["SK"]).partition("#")
            if kind == "app":
                app = self._row(_APP, item)
            elif rest.startswith(f"{app_id}#"):
                name = rest.removeprefix(f"{app_id}#")
                if kind == "m":
                    members.append(self._row(_MEMBER, item))
                elif kind == "c":
                    pending.append(name)
        commands = [row for name in pending if (row := await self._pending_command(name)) is not None]
        return Poll(
            app=app,
            members=tuple(sorted(members, key=lambda row: row.member_id)),
            commands=tuple(sorted(commands, key=requested)),
            evidence=None,
        )

    async def record_incarnation(self, expected: str, incarnation: str) -> AppRow | None:
        where = {"app_id": self._opened, "incarnation": expected}
        write = ItemWrite(self._app_key, {"incarnation": incarnation}, where=where)
        written = await self.table.update(write)
        return self._outcome(
            _APP, written, lambda row: rows.record_incarnation(row, self._opened, expected, incarnation)
        )

    async def move_app(self, expected: Place, place: Place, other_store: str) -> AppRow | None:
        values = {"place": place, "other_store": other_store or None}
        write = ItemWrite(self._app_key, values, where={"app_id": self._opened, "place": expected})
        written = await self.table.update(write, repeatable=True)
        return self._outcome(_APP, written, lambda row: rows.move_app(row, self._opened, expected, place, other_store))

    async def renew_watch(self) -> None:
        write = ItemWrite(self._app_key, where={"app_id": self._opened})
        write.set_next("watch", of="watch")
        await self.table.update(write)

    async def delete_app(self, app_id: str) -> bool:
        # Once the application's row is gone, nothing else names its id. So the deletion is recorded first.
        record = ItemKey(f"a#{self.app}", f"d#{app_id}")
        await self.table.put(record, {})
        is_deleted = (await self.table.delete(ItemWrite(self._app_key, where={"app_id": app_id}))).holds
        places = (
            (f"a#{self.app}", f"m#{app_id}#"),
            (f"a#{self.app}", f"c#{app_id}#"),
            (f"l#{self.app}#{app_id}", ""),
            (f"v#{self.app}#{app_id}", ""),
        )
        for partition, prefix in places:
            keys = [ItemKey(partition, str(item["SK"])) for item in await self.table.query(partition, prefix)]
            await write_all([ItemWrite(key) for key in keys], self.table.delete)
            is_deleted = is_deleted or bool(keys)
        await self.table.delete(ItemWrite(record))
        return is_deleted

    async def leftovers(self) -> Sequence[str]:
        if (app := await self.read_app()) is None and await self.table.describe() is None:
            return ()
        found = [str(item["SK"]).removeprefix("d#") for item in await self.table.query(f"a#{self.app}", "d#")]
        return sorted(app_id for app_id in found if app is None or app_id != app.app_id)

    # members

    async def register_member(self, row: MemberRow) -> MemberRow:
        requests = {request: number for number, request in enumerate(row.wanted, 1)}
        # The map exists from the start, because DynamoDB cannot set a key in a missing map.
        item = _MEMBER.values(row) | row.extra | {"wanted": requests, "requests_made": len(requests) or None}
        stored = await self.table.put(self._member_key(row.member_id), item)
        return row if stored is None else self._row(_MEMBER, stored)

    async def heartbeat(self, write: HeartbeatWrite) -> HeartbeatAnswer:
        update = ItemWrite(self._member_key(write.member_id), _heartbeat_values(write), where={"state": "live"})
        for request in write.answered:
            update.remove(f"wanted.{request}")
        update.when("counter", "<", write.attempt)
        written = await self.table.update(update, repeatable=True)
        before = self._before(_MEMBER, written)
        if before is not None and before.counter < self._counters.get(write.member_id, 0):
            self.table.forget_identity()  # it may have been restored
        row = self._outcome(_MEMBER, written, lambda stored: rows.heartbeat(stored, write))
        if row is not None:
            self._counters[write.member_id] = row.counter
        return HeartbeatAnswer(row, None if before is None else before.counter)

    async def seal_member(self, member_id: str, observed_counter: int) -> MemberRow | None:
        where = {"state": "live", "counter": observed_counter}
        write = ItemWrite(self._member_key(member_id), {"state": "sealed"}, where=where)
        written = await self.table.update(write, repeatable=True)
        return self._outcome(_MEMBER, written, lambda row: rows.seal_member(row, observed_counter))

    async def leave(self, member_id: str) -> MemberRow | None:
        write = ItemWrite(self._member_key(member_id), {"state": "left"}, where={"state": "live"})
        return self._outcome(_MEMBER, await self.table.update(write, repeatable=True), rows.leave)

    async def request_hand_off(self, donor: str, request: str) -> MemberRow | None:
        path = f"wanted.{request}"
        write = ItemWrite(self._member_key(donor), where={"state": "live", path: None})
        write.set_next(path, of="requests_made")
        write.set_next("requests_made", of="requests_made")
        write.when_smaller("wanted", REQUESTS_MAX)
        written = await self.table.update(write, repeatable=True)
        return self._outcome(_MEMBER, written, lambda row: rows.request_hand_off(row, request))

    async def delete_member(self, member_id: str) -> bool:
        # An ended member stays so. Its status is deleted first: after a failure, the caller still sees the member and
        # tries again.
        key = self._member_key(member_id)
        item = await self.table.get(key)
        if item is None or not rows.may_delete_member(self._row(_MEMBER, item)):
            return False
        await self.table.delete(ItemWrite(ItemKey(self._viewed, f"m#{member_id}")))
        write = ItemWrite(key)
        write.when("state", "<>", "live")
        written = await self.table.delete(write)
        return written.holds and written.before is not None

    async def write_status(self, row: StatusRow) -> None:
        write = ItemWrite(ItemKey(self._viewed, f"m#{row.member_id}"), _STATUS.values(row) | row.extra)
        write.when_older("revision", row.revision)
        await self.table.update(write, repeatable=True)

    async def read_statuses(self) -> Sequence[StatusRow]:
        found = [self._row(_STATUS, item) for item in await self.table.query(self._viewed, "m#")]
        return sorted(found, key=lambda row: row.member_id)

    # streams

    async def put_stream(self, row: StreamRow) -> StreamRow:
        key = ItemKey(self._leased, f"s#{row.stream_key}")
        stored = await self.table.put(key, {"app_name": self.app} | _STREAM.values(row) | row.extra)
        return row if stored is None else self._row(_STREAM, stored)

    async def write_stream(self, row: StreamRow, expected_version: int) -> StreamRow | None:
        key = ItemKey(self._leased, f"s#{row.stream_key}")
        values = _STREAM.values(replace(row, version=expected_version + 1))
        write = ItemWrite(key, values, where={"version": expected_version})
        written = await self.table.update(write)
        return self._outcome(_STREAM, written, lambda stored: rows.write_stream(stored, row, expected_version))

    async def read_streams(self) -> Sequence[StreamRow]:
        found = [self._row(_STREAM, item) for item in await self.table.query(self._leased, "s#")]
        return sorted(found, key=lambda row: row.stream_key)

    # leases

    async def create_lease(self, row: LeaseRow) -> LeaseRow:
        stored = await self.table.put(self._lease_key(row.key), self._lease_values(row) | row.extra)
        return row if stored is None else self._row(_LEASE, stored)

    async def read_leases(self, *, with_finished: bool = False) -> LeaseRows:
        found = await self.table.query_attributes(self._leased, "l#", unfinished=not with_finished)
        # Of thousands of leases, few have changed since they were last read, and comparing is faster than decoding.
        before, now = self._leases_read, dict[str, tuple[Any, LeaseRow]]()
        for attributes in found:
            name = _sort_key(attributes)
            known = before.get(name)
            if known is None or known[0] != attributes:
                known = (attributes, self._row(_LEASE, self.table.decoded(attributes)))
            now[name] = known
        self._leases_read = now
        return LeaseRows(sorted((row for _, row in now.values()), key=lambda row: row.key))

    async def read_lease(self, key: LeaseKey) -> LeaseRow | None:
        item = await self.table.get(self._lease_key(key))
        return None if item is None else self._row(_LEASE, item)

    async def take_lease(
        self, key: LeaseKey, member_id: str, *, expected_owner: str | None, expected_version: int, epoch_floor: int = 0
    ) -> LeaseRow | Conflict:
        take = partial(
            rows.take_lease,
            member_id=member_id,
            expected_owner=expected_owner,
            expected_version=expected_version,
            epoch_floor=epoch_floor,
        )
        # The new epoch is one more than the larger of epoch and floor, which no expression can compute. A floor is
        # mostly given for the first take of a child shard, whose epoch is 0: that is tried first, then a higher epoch.
        for is_below_floor in (True, False) if epoch_floor else (False,):
            values = {"lease_owner": member_id, "lease_count": expected_version + 1}
            if is_below_floor:
                values["epoch"] = epoch_floor + 1
            where = {"lease_count": expected_version, "lease_owner": expected_owner, "completed": False}
            write = ItemWrite(self._lease_key(key), values, where=where)
            write.set_next("takes_without_progress", of="takes_without_progress")
            if not is_below_floor:
                write.set_next("epoch", of="epoch")
            if epoch_floor:
                write.when("epoch", "<" if is_below_floor else ">=", epoch_floor)
            written = await self.table.update(write)
            if written.holds or isinstance(take(self._before(_LEASE, written)), Conflict):
                break
        return self._outcome(_LEASE, written, take)

    async def write_lease(self, row: LeaseRow, *, member_id: str, expected_version: int) -> LeaseRow | Conflict:
        values = self._lease_values(replace(row, version=expected_version + 1))
        where = {"lease_count": expected_version, "lease_owner": member_id}
        write = ItemWrite(self._lease_key(row.key), values, where=where)
        written = await self.table.update(write)
        change = partial(rows.write_lease, row=row, member_id=member_id, expected_version=expected_version)
        return self._outcome(_LEASE, written, change)

    async def delete_lease(self, key: LeaseKey, expected_version: int) -> bool:
        write = ItemWrite(self._lease_key(key), where={"lease_count": expected_version, "completed": True})
        return (await self.table.delete(write)).holds

    # commands

    async def put_control(self, row: ControlRow) -> None:
        stored = await self.table.put(self._command_key(row.command_id), _COMMAND.values(row) | row.extra)
        if stored is None or self._row(_COMMAND, stored).state == "pending":
            await self.table.put(self._pending_key(row.command_id), {})

    async def write_control(self, row: ControlRow) -> bool:
        write = ItemWrite(self._command_key(row.command_id), _COMMAND.values(row), where={"state": "pending"})
        written = await self.table.update(write)
        if written.before is not None:
            await self.table.delete(ItemWrite(self._pending_key(row.command_id)))
        return written.holds

    async def read_controls(self) -> Sequence[ControlRow]:
        return sorted((self._row(_COMMAND, item) for item in await self.table.query(self._viewed, "c#")), key=requested)

    async def _pending_command(self, command_id: str) -> ControlRow | None:
        item = await self.table.get(self._command_key(command_id))
        row = None if item is None else self._row(_COMMAND, item)
        if row is not None and row.state == "pending":
            return row
        # It was answered, and the call that should have deleted this item failed.
        await self.table.delete(ItemWrite(self._pending_key(command_id)))
        return None

    # keys and rows

    @property
    def _opened(self) -> str:
        if self._app_id is None:
            raise UsageError(f"the lease store {self} is not open: call open() first")
        return self._app_id

    @property
    def _app_key(self) -> ItemKey:
        return ItemKey(f"a#{self.app}", "app")

    @property
    def _leased(self) -> str:
        return f"l#{self.app}#{self._opened}"

    @property
    def _viewed(self) -> str:
        return f"v#{self.app}#{self._opened}"

    def _member_key(self, member_id: str) -> ItemKey:
        return ItemKey(f"a#{self.app}", f"m#{self._opened}#{member_id}")

    def _lease_key(self, key: LeaseKey) -> ItemKey:
        return ItemKey(self._leased, f"l#{key.stream_key}#{key.generation}#{key.shard_id}")

    def _command_key(self, command_id: str) -> ItemKey:
        return ItemKey(self._viewed, f"c#{command_id}")

    def _pending_key(self, command_id: str) -> ItemKey:
        return ItemKey(f"a#{self.app}", f"c#{self._opened}#{command_id}")

    def _lease_values(self, row: LeaseRow) -> dict[str, Any]:
        """With the names that people look for in the console. A finished lease, which stays for days, has none."""
        shown: dict[str, Any] = dict.fromkeys(("app_name", "stream_name", "shard_id"))
        if not row.is_finished:
            shown = {"app_name": self.app, "stream_name": row.key.stream_name, "shard_id": row.key.shard_id}
        return shown | _LEASE.values(row)

    def _row(self, shape: _Shape[R], item: Item) -> R:
        try:
            return shape.row(item)
        except (TypeError, ValueError) as error:
            raise LeaseStoreInvalidError(
                f"the row ({item.get('PK')}, {item.get('SK')}) of DynamoDB table {self.table.name!r} cannot be read: "
                f"{error}"
            ) from error

    def _before(self, shape: _Shape[R], written: WriteOutcome) -> R | None:
        return None if written.before is None else self._row(shape, written.before)

    def _outcome(self, shape: _Shape[R], written: WriteOutcome, change: Callable[[R | None], T]) -> T:
        """What `change` returns for the row before the write: the row after it, or why nothing was written."""
        before = self._before(shape, written)
        outcome = change(before)
        if written.holds != (isinstance(outcome, Row) and outcome is not before):
            raise LeaseStoreInvalidError(
                f"DynamoDB table {self.table.name!r} did not apply the condition of a write as DynamoDB does",
                advice="use AWS's own DynamoDB or DynamoDB Local",
            )
        return outcome


def _sort_key(attributes: Any) -> str:
    try:
        return str(attributes["SK"]["S"])
    except (KeyError, TypeError) as error:
        raise LeaseStoreInvalidError("the DynamoDB server returned a row without its key") from error
