"""`python tests/simulation/dynamodb_fleet.py`: fleets of real engines on the DynamoDB store, in virtual time.

--seed 42               replay one fleet and print its options
--seconds 60            try fresh seeds for this long (10 s by default)
--worlds 1000           try this many seeds, from --first on

The store is the one that ships. Below it is a DynamoDB in memory, over the simulated network: requests and answers are
lost, late and repeated, calls are throttled, the table is emptied or deleted and created again.
"""

import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import msgspec

sys.path.append(str(Path(__file__).parents[1]))  # as a program

from fleets import fleet_options_for
from harsh.fleet import HarshFleet
from harsh.lease_store import HarshRows
from harsh.options import HarshOptions
from seed_search import Simulation, search

from anabranch._aws.dynamodb_client import WriteOutcome, from_item
from anabranch._model.leases import MemberRow
from anabranch.errors import ThrottledError, TransportError
from anabranch.stores import dynamodb
from anabranch.stores.dynamodb import DEFAULT_TABLE, DynamoDbLeaseStore
from anabranch.stores.row_store import RowKey
from anabranch.testing.world.fleet import FleetVerdict
from anabranch.testing.world.options import APP
from anabranch.testing.world.processes import Network, SimulatedProcess
from memory_dynamodb import Attributes, MemoryClients, MemoryDynamoDb

THROTTLED = 0.03
"""Of the calls to the store."""


class DynamoDbRows(HarshRows):
    """The items of the table, and the same rows beside them for the checkers."""

    def __init__(self, fleet: HarshFleet) -> None:
        super().__init__(fleet)
        self.database = MemoryDynamoDb()

    def perform_write(self, operation: str, body: Attributes) -> tuple[WriteOutcome, RowKey | None, Any]:
        outcome = self.database.perform_write(operation, body)
        key = body["Item"] if operation == "PutItem" else body["Key"]
        place = (key["PK"]["S"], key["SK"]["S"])
        item = self.database.tables[DEFAULT_TABLE].get(place)
        row_key = _row_key(*place)
        if row_key is None or not outcome.holds:
            return outcome, None, None
        row = None if item is None else _SHAPES[row_key.kind].row(from_item(item))
        self.change([row_key], lambda _: [row])
        return outcome, row_key, row

    def empty(self, processes: Iterable[str], *, moves: bool) -> None:
        super().empty(processes, moves=moves)
        if not self.database.tables:
            return
        self.database.tables[DEFAULT_TABLE] = {}
        if moves:  # deleted and created again
            self.database.created_count += 1
            self.database.descriptions[DEFAULT_TABLE] = self.database.descriptions[DEFAULT_TABLE] | {
                "CreationDateTime": self.database.created_count
            }


def _row_key(partition: str, sort: str) -> RowKey | None:
    kind, _, rest = partition.partition("#")
    if sort == "app":
        return RowKey("app", rest, "")
    if kind == "a" and sort.startswith("m#"):
        _, app_id, member_id = sort.split("#", 2)
        return RowKey("member", rest, app_id, (member_id,))
    app, _, app_id = rest.rpartition("#")
    if kind == "l" and sort.startswith("s#"):
        return RowKey("stream", app, app_id, (sort.removeprefix("s#"),))
    if kind == "l":
        stream_key, generation, shard_id = sort.removeprefix("l#").rsplit("#", 2)
        return RowKey("lease", app, app_id, (stream_key, int(generation), shard_id))
    return None


_SHAPES = {"app": dynamodb._APP, "member": dynamodb._MEMBER, "stream": dynamodb._STREAM, "lease": dynamodb._LEASE}


class SimulatedDynamoDbClient:
    """A process's connection to DynamoDB."""

    region = MemoryDynamoDb.region

    def __init__(self, rows: DynamoDbRows, network: Network, process: SimulatedProcess, blocked_seconds: float) -> None:
        self._rows = rows
        self._network = network
        self._process = process
        self._blocked_seconds = blocked_seconds

    async def call(self, operation: str, body: Attributes, *, repeatable: bool = True) -> Attributes:
        return await self._send(operation, lambda: self._rows.database.perform(operation, body), lambda: None)

    async def write(self, operation: str, body: Attributes, *, repeatable: bool) -> WriteOutcome:
        body = {name: value for name, value in body.items() if value is not None}
        emptied_count = self._rows.emptied_count
        key = body["Item"] if operation == "PutItem" else body["Key"]
        is_commit = operation == "UpdateItem" and key["SK"]["S"].startswith("l#")

        def perform() -> WriteOutcome:
            outcome, row_key, row = self._rows.perform_write(operation, body)
            was_on_its_way = emptied_count != self._rows.emptied_count  # sent before, so no mistake
            if emptied_count and not was_on_its_way and row_key is not None:
                self._rows.made(self._process.name, row_key, row)
            return outcome

        return await self._send(operation, perform, self._report_blocked_commits if is_commit else lambda: None)

    async def _send(self, operation: str, perform: Callable[[], Any], on_trouble: Callable[[], None]) -> Any:
        def request() -> Any:
            if not self._network.is_calm and self._network._random.random() < THROTTLED:
                on_trouble()
                raise ThrottledError("slow down", operation=operation, code="ProvisionedThroughputExceededException")
            return perform()

        return await self._network.call(
            self._process, "store", request, TransportError("no answer in time"), on_trouble
        )

    def _report_blocked_commits(self) -> None:
        self._process.report_commits_blocked(self._blocked_seconds, since=self._process.world_ms() / 1000)

    async def close(self) -> None:
        """The rows stay."""


class SimulatedDynamoDbStore(DynamoDbLeaseStore):
    def __init__(self, fleet: HarshFleet, process: SimulatedProcess, *, call_deadline_ms: int) -> None:
        super().__init__(APP)
        client = SimulatedDynamoDbClient(fleet.rows, fleet.network, process, call_deadline_ms / 1000)
        self.table._clients = MemoryClients(client)
        self._rows = fleet.rows
        self._process = process

    async def register_member(self, row: MemberRow) -> MemberRow:
        self._rows.processes[row.member_id] = self._process.name
        return await super().register_member(row)

    async def leave(self, member_id: str) -> MemberRow | None:
        self._rows.tell_left(member_id)
        return await super().leave(member_id)


def dynamodb_options_for(seed: int) -> HarshOptions:
    """Without roll-backs: a table is restored only after it was deleted, which ends its workers."""
    return msgspec.structs.replace(fleet_options_for(seed), roll_back_seconds=0.0, roll_back_every_seconds=0.0)


def run_dynamodb_seed(
    seed: int, options: HarshOptions | None = None, store: type[SimulatedDynamoDbStore] = SimulatedDynamoDbStore
) -> FleetVerdict:
    class DynamoDbFleet(HarshFleet):
        rows_class = DynamoDbRows
        store_class = store

    return DynamoDbFleet(seed, options or dynamodb_options_for(seed)).run()


DYNAMODB_FLEETS = Simulation(
    "dynamodb fleet",
    "python tests/simulation/dynamodb_fleet.py",
    run_dynamodb_seed,
    dynamodb_options_for,
    ("steps", "starts", "commits", "zombies"),
    5,
)

if __name__ == "__main__":
    sys.exit(search(DYNAMODB_FLEETS))
