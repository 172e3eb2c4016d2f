"""A DynamoDB in memory, for simulations and for counting: the operations and expressions that the lease store uses.

It performs them as DynamoDB documents them, counts read and write units by the sizes of items, and refuses everything
else. The lease store's contract runs on it, on moto and on DynamoDB Local, so a difference between them is noticed.
"""

import asyncio
import re
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from functools import lru_cache
from typing import Any

from anabranch._aws.dynamodb_client import WriteOutcome, from_item
from anabranch.errors import InvalidRequestError, ResourceInUseError, StreamNotFoundError, TransportError

ITEM_BYTES_MAX = 400 << 10
PAGE_BYTES_MAX = 1 << 20
WRITE_UNIT_BYTES = 1 << 10
READ_UNIT_BYTES = 4 << 10

Attributes = dict[str, Any]

_TOKEN = re.compile(r"\s*([#:][A-Za-z0-9_]+|[A-Za-z_]+|<>|<=|>=|[=<>(),.+\-])")


def item_bytes(item: Attributes) -> int:
    """As AWS documents the size of an item."""
    return sum(len(name.encode()) + value_bytes(value) for name, value in item.items())


def value_bytes(value: Attributes) -> int:
    ((kind, content),) = value.items()
    if kind == "S":
        return len(content.encode())
    if kind == "N":
        digits = content.lstrip("-").replace(".", "").strip("0")
        return (len(digits) + 1) // 2 + 1 + content.startswith("-")
    if kind in {"BOOL", "NULL"}:
        return 1
    if kind == "M":
        return 3 + sum(1 + len(name.encode()) + value_bytes(element) for name, element in content.items())
    if kind == "L":
        return 3 + sum(1 + value_bytes(element) for element in content)
    if kind == "B":
        return len(content) * 3 // 4
    raise AssertionError(kind)


def units(size: int, unit: int) -> int:
    return max(1, -(-size // unit))


@lru_cache(1_000)
def _tokens(text: str) -> tuple[str, ...]:
    tokens = tuple(found[1] for found in _TOKEN.finditer(text))
    assert "".join(tokens) == re.sub(r"\s", "", text), f"cannot read {text!r}"
    return tokens


class Expression:
    """A condition or update expression with its names and values, performed on one item."""

    def __init__(self, text: str, body: Attributes, item: Attributes | None) -> None:
        self._tokens = _tokens(text)
        self._names = body.get("ExpressionAttributeNames", {})
        self._values = body.get("ExpressionAttributeValues", {})
        self._item = item or {}
        self._at = 0

    def _next(self, expected: str | None = None) -> str:
        token = self._tokens[self._at]
        assert expected in {None, token}, f"expected {expected}, found {token} in {self._tokens}"
        self._at += 1
        return token

    def _peek(self) -> str:
        return self._tokens[self._at] if self._at < len(self._tokens) else ""

    # conditions

    def holds(self) -> bool:
        result = self._or()
        assert not self._peek(), self._tokens
        return result

    def _or(self) -> bool:
        result = self._and()
        while self._peek() == "OR":
            self._next()
            result = self._and() or result
        return result

    def _and(self) -> bool:
        result = self._test()
        while self._peek() == "AND":
            self._next()
            result = self._test() and result
        return result

    def _test(self) -> bool:
        if self._peek() == "(":
            self._next()
            result = self._or()
            self._next(")")
            return result
        if self._peek() == "attribute_not_exists":
            self._next()
            self._next("(")
            path = self._path()
            self._next(")")
            return self._get(path) is None
        if self._peek() == "begins_with":
            self._next()
            self._next("(")
            value = self._operand()
            self._next(",")
            prefix = self._operand()
            self._next(")")
            return value is not None and value["S"].startswith(prefix["S"])
        left, operator, right = self._operand(), self._next(), self._operand()
        if left is None or right is None:
            return operator == "<>"
        one, other = (from_item({"value": side})["value"] for side in (left, right))
        if list(left) != list(right):
            return operator == "<>"
        return {
            "=": one == other,
            "<>": one != other,
            "<": one < other,
            "<=": one <= other,
            ">": one > other,
            ">=": one >= other,
        }[operator]

    def _operand(self) -> Attributes | None:
        if self._peek() == "size":
            self._next()
            self._next("(")
            value = self._get(self._path())
            self._next(")")
            return None if value is None else {"N": str(len(next(iter(value.values()))))}
        if self._peek().startswith(":"):
            return self._values[self._next()]
        return self._get(self._path())

    def _path(self) -> tuple[str, ...]:
        path = [self._names[self._next()]]
        while self._peek() == ".":
            self._next()
            path.append(self._names[self._next()])
        return tuple(path)

    def _get(self, path: tuple[str, ...]) -> Attributes | None:
        value = self._item.get(path[0])
        for name in path[1:]:
            value = None if value is None else value["M"].get(name)
        return value

    # updates

    def update(self) -> Attributes:
        """The item after it. All values are those before the update."""
        after = {name: {"M": dict(value["M"])} if "M" in value else value for name, value in self._item.items()}
        while self._peek():
            word = self._next()
            assert word in {"SET", "REMOVE"}, word
            while True:
                path = self._path()
                if word == "SET":
                    self._next("=")
                    self._place(after, path)[path[-1]] = self._sum()
                else:
                    self._place(after, path).pop(path[-1], None)
                if self._peek() != ",":
                    break
                self._next()
        return after

    def _place(self, item: Attributes, path: tuple[str, ...]) -> Attributes:
        for name in path[:-1]:
            if name not in item:
                raise refused("ValidationException", "The document path provided is invalid for update")
            item = item[name]["M"]
        return item

    def _sum(self) -> Attributes:
        value = self._term()
        while self._peek() == "+":
            self._next()
            other = self._term()
            value = {"N": str(int(value["N"]) + int(other["N"]))}
        return value

    def _term(self) -> Attributes:
        if self._peek() == "if_not_exists":
            self._next()
            self._next("(")
            path = self._path()
            self._next(",")
            value, default = self._get(path), self._operand()
            self._next(")")
            assert default is not None
            return default if value is None else value
        value = self._operand()
        assert value is not None
        return value


def refused(code: str, message: str) -> Exception:
    kind = {"ResourceNotFoundException": StreamNotFoundError, "ResourceInUseException": ResourceInUseError}
    return kind.get(code, InvalidRequestError)(message, operation="?", code=code)


class TableRows(dict[tuple[str, str], Attributes]):
    """The items of a table by their keys, and beside them by partition, with their sizes."""

    def __init__(self, items: dict[tuple[str, str], Attributes] | None = None) -> None:
        super().__init__()
        self.partitions: dict[str, dict[str, tuple[Attributes, int]]] = {}
        for key, item in (items or {}).items():
            self[key] = item

    def __setitem__(self, key: tuple[str, str], item: Attributes) -> None:
        super().__setitem__(key, item)
        self.partitions.setdefault(key[0], {})[key[1]] = (item, item_bytes(item))

    def __delitem__(self, key: tuple[str, str]) -> None:
        super().__delitem__(key)
        del self.partitions[key[0]][key[1]]

    def pop(self, key: tuple[str, str], default: Any = None) -> Any:
        if key not in self:
            return default
        item = self[key]
        del self[key]
        return item


class MemoryDynamoDb:
    """The tables, and the client of every process: `call` and `write` act at once."""

    region = "eu-west-1"

    def __init__(self) -> None:
        self.tables: dict[str, dict[tuple[str, str], Attributes]] = {}
        self.created_count = 0
        self.descriptions: dict[str, Attributes] = {}
        self.requests: Counter[str] = Counter()
        self.read_units = 0
        self.write_units = 0
        self.large_writes: Counter[str] = Counter()
        """Writes of more than one unit, by the beginning of their sort keys."""

    def _rows(self, name: str) -> TableRows:
        """A test may have put back what it had kept."""
        rows = self.tables[name]
        if not isinstance(rows, TableRows):
            rows = self.tables[name] = TableRows(rows)
        return rows

    async def call(self, operation: str, body: Attributes, *, repeatable: bool = True) -> Attributes:
        await asyncio.sleep(0)  # others get their turn, as over a network
        return self.perform(operation, body)

    async def write(self, operation: str, body: Attributes, *, repeatable: bool) -> WriteOutcome:
        await asyncio.sleep(0)
        return self.perform_write(operation, body)

    async def close(self) -> None:
        """The tables stay."""

    def perform(self, operation: str, body: Attributes) -> Attributes:
        body = {name: value for name, value in body.items() if value is not None}
        self.requests[operation] += 1
        name = body["TableName"]
        if operation == "CreateTable":
            return self._create(name, body)
        if name not in self.tables:
            raise refused("ResourceNotFoundException", "Cannot do operations on a non-existent table")
        match operation:
            case "DescribeTable":
                return {"Table": self.descriptions[name]}
            case "UpdateContinuousBackups":
                return {}
            case "DeleteTable":
                del self.tables[name]
                return {}
            case "GetItem":
                assert body["ConsistentRead"]
                item = self.tables[name].get(_key(body["Key"]))
                self.read_units += units(item_bytes(item or {}), READ_UNIT_BYTES)
                return {} if item is None else {"Item": item}
            case "Query" | "Scan":
                return self._query(operation, self._rows(name), body)
        raise AssertionError(operation)

    def _create(self, name: str, body: Attributes) -> Attributes:
        if name in self.tables:
            raise refused("ResourceInUseException", "Table already exists")
        self.tables[name] = TableRows()
        self.created_count += 1
        self.descriptions[name] = {
            "TableStatus": "ACTIVE",
            "TableArn": f"arn:aws:dynamodb:{self.region}:123456789012:table/{name}",
            "CreationDateTime": self.created_count,
            "KeySchema": body["KeySchema"],
            "AttributeDefinitions": body["AttributeDefinitions"],
        }
        return {"TableDescription": self.descriptions[name]}

    def _query(self, operation: str, rows: TableRows, body: Attributes) -> Attributes:
        assert body["ConsistentRead"]
        if operation == "Scan":
            found = list(rows.values())
        else:
            assert body["KeyConditionExpression"].replace(" AND begins_with(#SK, :prefix)", "") == "#PK = :partition"
            values = body["ExpressionAttributeValues"]
            prefix = values.get(":prefix", {"S": ""})["S"]
            partition = rows.partitions.get(values[":partition"]["S"], {})
            chosen = [partition[sort] for sort in sorted(partition, reverse=True) if sort.startswith(prefix)]
            found, size = [item for item, _ in chosen], sum(size for _, size in chosen)
            self.read_units += units(size, READ_UNIT_BYTES)
            self.requests["Query"] += size // PAGE_BYTES_MAX  # it would have taken as many pages
        if (selected := body.get("FilterExpression")) is not None:
            if selected == "#completed = :no":  # thousands of items, so not by the interpreter
                found = [item for item in found if item.get("completed") == {"BOOL": False}]
            else:
                found = [item for item in found if Expression(selected, body, item).holds()]
        return {"Items": found}

    def perform_write(self, operation: str, body: Attributes) -> WriteOutcome:
        body = {name: value for name, value in body.items() if value is not None}
        self.requests[operation] += 1
        if body["TableName"] not in self.tables:
            raise refused("ResourceNotFoundException", "Requested resource not found")
        rows = self._rows(body["TableName"])
        key = _key(body["Item"] if operation == "PutItem" else body["Key"])
        before = rows.get(key)
        condition = body.get("ConditionExpression")
        holds = condition is None or Expression(condition, body, before).holds()
        after = before
        if holds:
            after = self._after(operation, body, before)
            if after is None:
                rows.pop(key, None)
            else:
                assert item_bytes(after) <= ITEM_BYTES_MAX
                rows[key] = after
        self._count_write(key, before, after)
        assert body["ReturnValues"] == "ALL_OLD"
        assert condition is None or body["ReturnValuesOnConditionCheckFailure"] == "ALL_OLD"
        return WriteOutcome(holds, None if before is None else from_item(before))

    def _after(self, operation: str, body: Attributes, before: Attributes | None) -> Attributes | None:
        if operation == "DeleteItem":
            return None
        if operation == "PutItem":
            return dict(body["Item"])
        return body["Key"] | Expression(body["UpdateExpression"], body, before).update()

    def _count_write(self, key: tuple[str, str], before: Attributes | None, after: Attributes | None) -> None:
        written = units(max(item_bytes(before or {}), item_bytes(after or {})), WRITE_UNIT_BYTES)
        self.write_units += written
        if written > 1:
            self.large_writes[f"{key[0][:2]}{key[1][:2]}"] += 1


class FailingDynamoDb(MemoryDynamoDb):
    """Its connection breaks at the given call, before that takes effect or after it."""

    calls_left: int | None = None
    breaks = "before"

    def perform(self, operation: str, body: Attributes) -> Attributes:
        return self._try(super().perform, operation, body)

    def perform_write(self, operation: str, body: Attributes) -> WriteOutcome:
        return self._try(super().perform_write, operation, body)

    def _try(self, perform: Callable[[str, Attributes], Any], operation: str, body: Attributes) -> Any:
        if self.calls_left is not None:
            self.calls_left -= 1
            if self.calls_left == 0:
                if self.breaks == "after":
                    with suppress(StreamNotFoundError):
                        perform(operation, body)
                raise TransportError("cut off")
        return perform(operation, body)


def _key(item: Attributes) -> tuple[str, str]:
    return item["PK"]["S"], item["SK"]["S"]


class MemoryClients:
    """In the place of a table's connections."""

    def __init__(self, client: Any) -> None:
        self.client = client

    async def get(self) -> Any:
        return self.client

    async def close(self) -> None:
        """Nothing is open."""
