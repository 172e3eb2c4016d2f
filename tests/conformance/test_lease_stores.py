"""Every store passes the public contract, and the contract catches stores that break it."""

import asyncio

import pytest

from anabranch._model.leases import Conflict
from anabranch.stores import MemoryLeaseStore, SqliteLeaseStore
from anabranch.testing.lease_store_contract import check_lease_store


def test_the_memory_store_keeps_the_contract():
    check_lease_store(lambda app: MemoryLeaseStore(), durable=False)


def test_the_sqlite_store_keeps_the_contract(tmp_path):
    check_lease_store(lambda app: SqliteLeaseStore(tmp_path / "leases.db", app))


class UpsertingStore(MemoryLeaseStore):
    async def heartbeat(self, beat):
        from anabranch.testing.lease_store_contract import member

        await self.register_member(member(beat.member_id))
        return await super().heartbeat(beat)


class TakingFromAnybodyStore(MemoryLeaseStore):
    async def take_lease(self, key, member_id, *, expected_owner, expected_version, epoch_floor=0):
        stored = self._leases.get(key)
        return await super().take_lease(
            key,
            member_id,
            expected_owner=stored and stored.owner,
            expected_version=expected_version,
            epoch_floor=epoch_floor,
        )


class LastWriteWinsStore(MemoryLeaseStore):
    async def write_lease(self, row, *, member_id, expected_version):
        stored = self._leases.get(row.key)
        if stored is None:
            return Conflict(None)
        return await super().write_lease(row, member_id=member_id, expected_version=stored.version)


class RacyStore(MemoryLeaseStore):
    async def create_lease(self, row, *, app_id):
        if await self.read_lease(row.key) is None:
            await asyncio.sleep(0)
            self._leases[row.key] = row
        return self._leases[row.key]


class CarelessStore(MemoryLeaseStore):
    async def put_stream(self, row, *, app_id):
        return self._streams.setdefault(row.stream_key, row)


class ForgetfulStore(MemoryLeaseStore):
    async def read_leases(self, *, with_finished=False):
        return await super().read_leases(with_finished=True)


@pytest.mark.parametrize(
    "store, rule",
    [
        (UpsertingStore, "a heartbeat raises the counter of a live row and makes none"),
        (TakingFromAnybodyStore, "a lease is taken from the expected owner at the expected version"),
        (LastWriteWinsStore, "one of many writes of a version holds"),
        (RacyStore, "many who create agree on one row"),
        (CarelessStore, "nothing begins in another application of the name"),
        (ForgetfulStore, "rows are read in order and finished ones only when asked for"),
    ],
)
def test_the_contract_catches_a_store_that_breaks_it(store, rule):
    with pytest.raises(ExceptionGroup, match="of the lease store contract do not hold") as caught:
        check_lease_store(lambda app: store(), durable=False)
    notes = [note for failure in caught.value.exceptions for note in failure.__notes__]
    assert any(rule in note for note in notes), notes
