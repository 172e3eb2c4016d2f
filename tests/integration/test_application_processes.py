"""`Application` on workers that were killed, with real processes: it deletes only what is dead."""

import asyncio
import os
import signal
import subprocess
import sys

from anabranch import Application
from anabranch.stores.sqlite import SqliteLeaseStore

from stream_world import run

MEMBER_THAT_HANGS = """
import asyncio, sys, time
from anabranch._model.leases import AppRow, MemberRow
from anabranch.stores.sqlite import SqliteLeaseStore
async def main():
    store = SqliteLeaseStore(sys.argv[1], "billing")
    await store.open(AppRow(app="billing", app_id="id", created_wall_ms=0))
    await store.register_member(MemberRow(member_id="a#1", expiry_ms=int(sys.argv[2])))
    print("ready", flush=True)
    time.sleep(60)
asyncio.run(main())
"""


def test_a_fleet_that_was_killed_can_be_deleted_and_one_that_hangs_is_watched_first(tmp_path):
    """The first is proved dead by its lock; of the second only its expiry tells."""
    path = tmp_path / "leases.db"

    async def main():
        process = subprocess.Popen(  # noqa: ASYNC220 -- it is listened to below
            [sys.executable, "-c", MEMBER_THAT_HANGS, str(path), "1000"], stdout=subprocess.PIPE, text=True
        )
        try:
            assert await asyncio.to_thread(process.stdout.readline) == "ready\n"
            async with Application("billing", leases=f"sqlite://{path}") as application:
                assert [member.state for member in (await application.status()).members] == ["live"]
                os.kill(process.pid, signal.SIGKILL)
                await asyncio.to_thread(process.wait)
                assert [member.state for member in (await application.status()).members] == ["dead"]
                await application.delete()
        finally:
            process.kill()
            process.communicate()
        store = SqliteLeaseStore(path, "billing")
        assert await store.read_app() is None
        await store.close()
        process = subprocess.Popen(  # noqa: ASYNC220 -- as above
            [sys.executable, "-c", MEMBER_THAT_HANGS, str(path), "1000"], stdout=subprocess.PIPE, text=True
        )
        try:
            assert await asyncio.to_thread(process.stdout.readline) == "ready\n"
            async with Application("billing", leases=f"sqlite://{path}") as application:
                await application.delete()
        finally:
            process.kill()
            process.communicate()

    run(main)
