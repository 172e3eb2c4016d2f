"""The lease store of a harsh fleet: it can be rolled back, emptied, or lose a row.

After a roll-back it reports another storage identity, and requests on their way to the old storage are lost.
"""

from anabranch._model.leases import AppRow, LeaseRow, StreamRow
from anabranch.errors import LeaseStoreError
from anabranch.stores.row_store import Changed
from anabranch.testing.journal import Checker, Fact, LeaseDeleted, LeaseWrite, StoreEmptied, StoreWentBack
from anabranch.testing.world.lease_store import SimulatedLeaseStore, SimulatedRows, StoreConnection

_MADE = {"app": "the application", "lease": "a lease", "stream": "a stream"}


class RowMade(Fact, frozen=True):
    """A process asked the store to make an application, a stream or a lease, and the store has it now."""

    at_ms: int
    process: str
    what: str


class OneApplication(Checker):
    """A process that has worked for an application never creates it a second time: after the store was emptied, it
    makes no row there.
    """

    promise = "one application"

    def __init__(self):
        super().__init__()
        self._orphans = {}

    def tell(self, fact):
        match fact:
            case StoreEmptied(processes):
                self._orphans |= dict.fromkeys(processes)
            case RowMade(at_ms, process, what) if process in self._orphans:
                self.complain(at_ms, f"{process} was running before the store was emptied, and makes {what} again")


class HarshRows(SimulatedRows):
    """The rows and their history."""

    def __init__(self, fleet):
        super().__init__(fleet)
        self._journal.checkers.append(OneApplication())
        self.storage = 0
        self.emptied_count = 0
        self.has_lost_streams = False
        """The store has lost the application or one of its streams at least once."""
        self._stream = fleet.stream
        self._keeps_history = bool(fleet.options.roll_back_seconds)
        self._past = []

    @property
    def identity(self):
        return f"storage-{self.storage}"

    def _lease_write(self, row):
        return LeaseWrite(self._now_ms(), row, self._stream.incarnation_of(row.key))

    def remember(self):
        """Remembers the rows as they are now, before the next change."""
        if self._keeps_history:
            self._past.append((self._now_ms(), {place: dict(kept) for place, kept in self.places.items()}))

    def roll_back(self, by_ms):
        """Undoes the writes of the last `by_ms`. Returns False if there is no state to go back to."""
        wanted_ms = self._now_ms() - by_ms
        kept = next((places for ended_ms, places in self._past if ended_ms > wanted_ms), None)
        if kept is None or not any(isinstance(row, AppRow) for rows in kept.values() for row in rows.values()):
            return False
        begun = self._all(StreamRow)
        self.places = kept
        there = self._all(StreamRow)
        if any(there.get(key) != row for key, row in begun.items()):
            self.has_lost_streams = True
        self._past.clear()
        self.storage += 1
        self._journal.tell(StoreWentBack())
        return True

    def _all(self, kind):
        return {key: row for rows in self.places.values() for key, row in rows.items() if isinstance(row, kind)}

    @property
    def has_streams(self):
        return bool(self._all(StreamRow))

    @property
    def all_shards_have_progress(self):
        """The rows show for every shard how far it was read. Before that, losses by trimming need not be reported."""
        return bool(self.leases) and all(
            row.is_finished or row.checkpoint.watermark is not None or row.checkpoint.seen_through_seconds is not None
            for row in self.leases
        )

    def delete_lease(self, random):
        """Deletes a lease row as an operator would, behind the back of the fleet. One row stays."""
        places = [
            (rows, key) for rows in self.places.values() for key, row in rows.items() if isinstance(row, LeaseRow)
        ]
        if len(places) > 1:
            rows, key = random.choice(places)
            row = rows.pop(key)
            assert isinstance(row, LeaseRow)
            self._journal.tell(LeaseDeleted(self._lease_write(row).shard_id, row))

    def empty(self, processes, *, moves):
        """Deletes everything while these processes are running. `moves`: the store then reports another storage."""
        self.places = {}
        self._past.clear()
        self.emptied_count += 1
        self.storage += moves
        self.has_lost_streams = True
        self._journal.tell(StoreEmptied(tuple(processes)))

    def made(self, process, key, row):
        """Reports a row that a process wrote after the store was emptied. Nobody sees a row under an old `app_id`."""
        is_seen = any(isinstance(app, AppRow) and app.app_id == key.app_id for app in self._all(AppRow).values())
        if row is not None and key.kind in _MADE and (is_seen or isinstance(row, AppRow)):
            self._journal.tell(RowMade(self._now_ms(), process, _MADE[key.kind]))


class HarshConnection(StoreConnection):
    def __init__(self, fleet, process, **options):
        super().__init__(fleet, process, **options)
        self._storage = fleet.rows.storage
        """The storage that this connection leads to."""

    async def _ask(self, call):
        storage = self._storage

        def request():
            if self._rows.storage != storage:
                self._storage = self._rows.storage
                raise LeaseStoreError("the connection was lost: the store failed over")
            self._rows.remember()
            return call()

        return await super()._ask(request)

    async def change(self, keys, update):
        emptied_count = self._rows.emptied_count

        def call():
            before, after = self._rows.change(keys, update)
            was_on_its_way = emptied_count != self._rows.emptied_count  # sent before, so no mistake
            for key, old, new in zip(keys, before, after, strict=True):
                if emptied_count and not was_on_its_way and new is not old:
                    self._rows.made(self._process.name, key, new)
            return Changed(before, after, self._rows.identity)

        return await self._ask(call)


class HarshLeaseStore(HarshConnection, SimulatedLeaseStore):
    connection_class = HarshConnection
