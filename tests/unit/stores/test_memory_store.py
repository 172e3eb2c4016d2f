import asyncio

import pytest

from anabranch._model.leases import AppRow
from anabranch.errors import UsageError
from anabranch.stores import MemoryLeaseStore


def test_one_memory_store_holds_one_application():
    async def main():
        store = MemoryLeaseStore()
        await store.open(AppRow(app="billing", app_id="1", created_wall_ms=1))
        with pytest.raises(UsageError, match="holds application 'billing'; make another one for 'audit'"):
            await store.open(AppRow(app="audit", app_id="2", created_wall_ms=1))

    asyncio.run(main())
