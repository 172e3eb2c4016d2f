"""DynamoDB calls: plain Python values in, plain values out. It knows nothing about leases.

Retries are up to the caller, except for the three repairs in `service`. A client belongs to one event loop;
`DynamoDbByLoop` has one for each.
"""

from collections.abc import Mapping
from typing import Any, Final, NamedTuple, cast

import msgspec
from pybase64 import b64decode, b64encode

from anabranch._aws.account import AwsAccount, ServiceAddress
from anabranch._aws.service import AwsService, ServiceName, open_service
from anabranch._event_loops import PerLoop
from anabranch._http.client.connection import ClientResponse
from anabranch._http.client.limits import ClientTimeouts
from anabranch._wire.bodies import decode_aws_error, encode_request
from anabranch.errors import CodecError

_DYNAMODB: Final = ServiceName("dynamodb", "DynamoDB_20120810", "application/x-amz-json-1.0")

Item = dict[str, Any]
"""A row: attribute names and plain values."""

_CONNECTIONS_MAX: Final = 32
_TIMEOUTS: Final = ClientTimeouts(connect=5.0, read=10.0, total=20.0)
"""Callers have shorter deadlines of their own."""

_answer = msgspec.json.Decoder(dict[str, Any])


class WriteOutcome(NamedTuple):
    holds: bool
    """False: the condition failed, and nothing was written."""
    before: Item | None
    """The row as it was; None if there was none, or if the request did not ask for it."""


class DynamoDbClient:
    def __init__(self, service: AwsService) -> None:
        self.region = service.region
        self._service = service

    async def call(self, operation: str, body: dict[str, Any], *, repeatable: bool = True) -> dict[str, Any]:
        """Takes and returns attribute values in DynamoDB's form."""
        return await self._service.call("calls", operation, encode_request(body), _decode, repeatable=repeatable)

    async def write(self, operation: str, body: dict[str, Any], *, repeatable: bool) -> WriteOutcome:
        """A PutItem, UpdateItem or DeleteItem. `repeatable`: sending it twice has the same result."""
        return await self._service.call(
            "calls",
            operation,
            encode_request(body),
            _decode_write,
            repeatable=repeatable,
            refused=_decode_failed_condition,
        )

    async def close(self) -> None:
        await self._service.close()


def _decode(response: ClientResponse) -> dict[str, Any]:
    try:
        return _answer.decode(bytes(response.body))
    except msgspec.MsgspecError as error:
        raise CodecError(f"the answer is not a JSON object: {error}") from error


def _decode_write(response: ClientResponse) -> WriteOutcome:
    before = _decode(response).get("Attributes")
    return WriteOutcome(holds=True, before=None if before is None else from_item(before))


def _decode_failed_condition(response: ClientResponse) -> WriteOutcome | None:
    if decode_aws_error(response.body).code != "ConditionalCheckFailedException":
        return None
    before = _decode(response).get("Item")
    return WriteOutcome(holds=False, before=None if before is None else from_item(before))


# Attribute values


def to_item(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: to_attribute(value) for name, value in values.items()}


def from_item(attributes: Any) -> Item:
    if not isinstance(attributes, dict):
        raise CodecError(f"an item is an object of attributes, not {type(attributes).__name__}")
    return {name: from_attribute(attribute) for name, attribute in attributes.items()}


def to_attribute(value: Any) -> dict[str, Any]:
    match value:
        case None:
            return {"NULL": True}
        case bool():
            return {"BOOL": value}
        case int() | float():
            return {"N": repr(value)}
        case str():
            return {"S": value}
        case bytes():
            return {"B": b64encode(value).decode("ascii")}
        case list() | tuple():
            return {"L": [to_attribute(element) for element in value]}
        case dict():
            return {"M": to_item(value)}
    raise CodecError(f"DynamoDB has no type for {type(value).__name__}")


def from_attribute(attribute: Any) -> Any:
    try:
        ((kind, value),) = attribute.items()
        match kind:
            case "S" | "BOOL" | "SS":
                return value
            case "NULL":
                return None
            case "N":
                return _number(value)
            case "NS":
                return [_number(number) for number in value]
            case "B":
                return b64decode(value, validate=True)
            case "BS":
                return [b64decode(element, validate=True) for element in value]
            case "L":
                return [from_attribute(element) for element in value]
            case "M":
                return from_item(value)
    except (AttributeError, TypeError, ValueError) as error:
        raise CodecError(f"not an attribute value: {error}") from error
    raise CodecError(f"an attribute value of the unknown type {cast('str', kind)!r}")


def _number(text: str) -> int | float:
    try:
        return int(text)
    except ValueError:
        return float(text)


# Writes


class ItemKey(NamedTuple):
    partition: str
    sort: str

    def attributes(self) -> dict[str, Any]:
        return to_item({"PK": self.partition, "SK": self.sort})


class ItemWrite:
    """One conditional write. Every attribute name is aliased, because many are reserved words of DynamoDB.

    `values`: attributes to set; the value None removes the attribute. `where`: values that attributes must have; None
    requires that the attribute, or the map entry at its path, is absent.
    """

    def __init__(self, key: ItemKey, values: Mapping[str, Any] = {}, *, where: Mapping[str, Any] = {}) -> None:
        self.key = key
        self.conditions: list[str] = []
        self.item: Item | None = None
        """The whole row, for a PutItem."""
        self._sets: list[str] = []
        self._removes: list[str] = []
        self._names: dict[str, str] = {}
        self._values: dict[str, Any] = {}
        for name, value in values.items():
            if value is None:
                self.remove(name)
            else:
                self._sets.append(f"{self._name(name)} = {self._value(value)}")
        for path, value in where.items():
            if value is None:
                self.conditions.append(f"attribute_not_exists({self._path(path)})")
            else:
                self.when(path, "=", value)

    def set_next(self, path: str, of: str) -> None:
        """Sets `path` to the number in attribute `of`, plus one. An absent `of` counts as 0."""
        self._sets.append(f"{self._path(path)} = if_not_exists({self._name(of)}, {self._value(0)}) + {self._value(1)}")

    def remove(self, path: str) -> None:
        self._removes.append(self._path(path))

    def when(self, name: str, operator: str, value: Any) -> None:
        self.conditions.append(f"{self._name(name)} {operator} {self._value(value)}")

    def when_older(self, name: str, number: int) -> None:
        """Requires that the attribute is below the number, or that there is no row yet."""
        self.conditions.append(
            f"(attribute_not_exists({self._name('PK')}) OR {self._name(name)} < {self._value(number)})"
        )

    def when_smaller(self, name: str, size: int) -> None:
        self.conditions.append(f"size({self._name(name)}) < {self._value(size)}")

    def body(self, table: str) -> dict[str, Any]:
        updates = [
            f"{word} {', '.join(parts)}" for word, parts in (("SET", self._sets), ("REMOVE", self._removes)) if parts
        ]
        body: dict[str, Any] = {
            "TableName": table,
            "ConditionExpression": " AND ".join(self.conditions) or None,
            "UpdateExpression": " ".join(updates) or None,
            "ExpressionAttributeNames": self._names or None,
            "ExpressionAttributeValues": self._values or None,
            "ReturnValues": "ALL_OLD",
            "ReturnValuesOnConditionCheckFailure": "ALL_OLD" if self.conditions else None,
        }
        if self.item is None:
            return body | {"Key": self.key.attributes()}
        return body | {"Item": self.key.attributes() | to_item(self.item)}

    def _name(self, name: str) -> str:
        alias = f"#{name}"
        self._names[alias] = name
        return alias

    def _path(self, path: str) -> str:
        """Aliases a path: an attribute, or an attribute and a key of its map, as in `wanted.KEY`."""
        name, dot, key = path.partition(".")
        if not dot:
            return self._name(name)
        alias = f"#key{len(self._names)}"
        self._names[alias] = key
        return f"{self._name(name)}.{alias}"

    def _value(self, value: Any) -> str:
        alias = f":v{len(self._values)}"
        self._values[alias] = to_attribute(value)
        return alias


# Several event loops


class DynamoDbByLoop(PerLoop[DynamoDbClient]):
    """A client for each event loop that uses the store."""

    def __init__(self, account: AwsAccount, region: str | None, endpoint_url: str | None) -> None:
        super().__init__()
        self._account = account
        self._region = region
        self._endpoint_url = endpoint_url
        self._address: ServiceAddress | None = None

    async def open_client(self) -> DynamoDbClient:
        """Raises if there are no credentials. Opens no connection."""
        account = self._account
        if self._address is None:
            self._address = await account.address("dynamodb", region=self._region, endpoint_url=self._endpoint_url)
        await account.credentials.get()
        service = await open_service(
            _DYNAMODB, self._address, account.credentials, purposes={"calls": _CONNECTIONS_MAX}, timeouts=_TIMEOUTS
        )
        return DynamoDbClient(service)
