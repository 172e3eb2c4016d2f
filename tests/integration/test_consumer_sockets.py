"""A consumer over real sockets and a SQLite file: one test for each way in which these differ from a simulation."""

import logging
import threading

import pytest

import anabranch
from anabranch import Retry
from anabranch.errors import ShardStoppedError
from anabranch.records import Record
from patience import PATIENCE
from two_workers import check_forced_hand_off

from stream_world import check_order, numbers, run, stream_world

KEYS = [f"user-{i}" for i in range(12)]


def test_a_stateful_consumer_was_offline_during_a_reshard(tmp_path):
    async def main():
        async with stream_world(2) as world:
            options = {"app": "billing", "leases": f"sqlite:///{tmp_path}/leases.db", "until": "tip"}
            seen: list[Record[bytes]] = []

            async def consume():
                async with world.consumer(**options) as consumer:
                    seen.extend([record async for record in consumer])

            world.put(KEYS * 2)
            await consume()
            world.put(KEYS)
            world.split()
            world.put(KEYS)
            await consume()
            world.put(KEYS)
            await consume()
            check_order(seen)
            assert sorted(numbers(seen)) == list(range(world.put_count))

    run(main)


def test_an_error_text_that_no_store_can_keep_stops_its_shard_and_not_its_worker(tmp_path, caplog):
    caplog.set_level(logging.CRITICAL, "anabranch")  # pytest-xdist cannot send such a log

    async def main():
        async with stream_world(1) as world:
            world.put(["a"])

            async def handle(_):
                raise OSError("no such file: caf\udce9.csv")  # as os.fsdecode gives names that are not UTF-8

            consumer = world.consumer(
                app="billing", leases=f"sqlite:{tmp_path}/leases.db", until="tip", on_failure=Retry(attempts=1)
            )
            with pytest.raises(ShardStoppedError, match="udce9"):
                await consumer.run(handle, handle_signals=False)
            async with anabranch.Application("billing", leases=f"sqlite:{tmp_path}/leases.db") as application:
                (shard,) = (await application.status()).shards
            assert shard.state == "stopped"
            assert "OSError: no such file: caf\\udce9.csv" in str(shard.stopped.reason)

    run(main)


def test_a_forced_hand_off_waits_for_a_call_that_cannot_be_cancelled():
    async def main():
        async with stream_world(2) as world:
            go_on, running, effects = threading.Event(), [], []

            def handle(record):
                running.append(record)
                go_on.wait(PATIENCE)
                effects.append(("first", int(record.data)))

            await check_forced_hand_off(world, handle, running, effects, go_on)

    run(main)
