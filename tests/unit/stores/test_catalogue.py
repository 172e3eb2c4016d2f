"""Which applications exist, and the error for an unknown one."""

import asyncio

import pytest

from anabranch._model.leases import AppRow
from anabranch.errors import AccessDeniedError, ConfigurationError, LeaseStoreInvalidError
from anabranch.stores.catalogue import StoredApplication, find_store, stored_applications
from anabranch.stores.dynamodb import DynamoDbLeaseStore
from anabranch.stores.memory import MemoryLeaseStore
from anabranch.stores.sqlite import SqliteLeaseStore
from anabranch.stores.urls import embedded_file, open_store
from memory_dynamodb import MemoryClients, MemoryDynamoDb


def run(main):
    return asyncio.run(main)


async def make(path, *apps):
    path.parent.mkdir(parents=True, exist_ok=True)
    for app in apps:
        store = SqliteLeaseStore(path, app)
        await store.open(AppRow(app=app, app_id=f"id of {app}", created_wall_ms=0))
        await store.close()


def environment(tmp_path):
    return {"XDG_STATE_HOME": str(tmp_path)}


def test_embedded_stores_are_found_by_what_is_in_them(tmp_path):
    async def main():
        environ = environment(tmp_path)
        assert await stored_applications(None, environ) == []
        for app in ("billing", "a/b"):
            await make(embedded_file(app, environ), app)
        (tmp_path / "anabranch" / "notes.txt").write_text("no store")
        found = await stored_applications(None, environ)
        assert sorted(one.app for one in found) == ["a/b", "billing"]
        assert found[1].leases == f"sqlite://{tmp_path}/anabranch/billing.db"
        for one in found:
            store = open_store(one.leases, one.app)
            assert (await store.read_app()).app == one.app
            await store.close()

    run(main())


def test_a_named_file_may_hold_several(tmp_path):
    async def main():
        path = tmp_path / "leases.db"
        await make(path, "returns", "orders")
        url = f"sqlite://{path}"
        assert await stored_applications(url, {}) == [
            StoredApplication("orders", url),
            StoredApplication("returns", url),
        ]
        assert await stored_applications("memory://", {}) == []
        with pytest.raises(ConfigurationError):
            await stored_applications("ftp://leases", {})

    run(main())


def test_an_application_is_named_without_the_password_of_its_store():
    assert repr(StoredApplication("billing", "redis://u:secret@host/0")) == (
        "StoredApplication('billing', 'redis://…@host/0')"
    )


def test_looking_makes_nothing(tmp_path):
    async def main():
        for leases, said in (
            (None, "there is no application 'billing' in .*; it has no applications"),
            (f"sqlite://{tmp_path}/leases.db", "there is no lease store sqlite://.*: no file .*/leases.db"),
        ):
            with pytest.raises(LeaseStoreInvalidError, match=said):
                await find_store("billing", leases, environment(tmp_path))
        assert list(tmp_path.iterdir()) == []

    run(main())


def test_without_the_right_to_list_applications_an_unknown_one_is_still_unknown(monkeypatch):
    class WithoutScan(MemoryDynamoDb):
        def perform(self, operation, body):
            if operation == "Scan":
                raise AccessDeniedError("not authorized", operation="Scan", code="AccessDeniedException")
            return super().perform(operation, body)

    async def main():
        database = WithoutScan()

        def make_store(url, app, aws=None):
            store = DynamoDbLeaseStore(app)
            store.table._clients = MemoryClients(database)
            return store

        monkeypatch.setattr("anabranch.stores.catalogue.open_store", make_store)
        await make_store("", "billing").open(AppRow(app="billing", app_id="id", created_wall_ms=0))
        with pytest.raises(LeaseStoreInvalidError, match="no application 'biling' in dynamodb://; if its workers use"):
            await find_store("biling", "dynamodb://", {})

    run(main())


def test_an_application_that_is_not_there_is_answered_with_those_that_are(tmp_path):
    async def main():
        path = tmp_path / "leases.db"
        await make(path, "billing")
        with pytest.raises(LeaseStoreInvalidError, match="did you mean 'billing'"):
            await find_store("biling", f"sqlite://{path}", {})
        await make(path, *(f"app-{number:02}" for number in range(11)))
        with pytest.raises(LeaseStoreInvalidError, match=r"existing applications: app-00, .* and 2 more"):
            await find_store("zzz", f"sqlite://{path}", {})
        with pytest.raises(LeaseStoreInvalidError, match=r"there is no application 'billing' in this store$"):
            await find_store("billing", MemoryLeaseStore(), {})
        other = MemoryLeaseStore()
        await other.open(AppRow(app="audit", app_id="id", created_wall_ms=0))
        with pytest.raises(LeaseStoreInvalidError, match=r"there is no application 'billing' in this store$"):
            await find_store("billing", other, {})

    run(main())
