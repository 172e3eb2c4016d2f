"""What one owner of a shard leaves to the next: how often a record has failed, and what is finished in which order."""

import asyncio

import pytest

from anabranch import Retry, events
from anabranch.errors import ShardStoppedError
from anabranch.stores.memory import MemoryLeaseStore

from simulated_stream import numbers, run, stream_world, until


@pytest.mark.parametrize("way", ["shard", "key", "none", "batches"])
def test_failed_attempts_are_counted_over_a_fail_over(way):
    async def main():
        async with stream_world(1) as world:
            world.put("abc")
            store, attempts, happened = MemoryLeaseStore(), [], []

            async def handle(item, context):
                first = item if way != "batches" else item.records[0]
                if first.partition_key == "a":
                    attempts.append(context.attempt)
                    raise ValueError("no such customer")

            def consumer(backoff):
                return world.consumer(
                    app="billing", leases=store, order="shard" if way == "batches" else way, until="tip",
                    on_event=happened.append, on_failure=Retry(attempts=3, backoff=backoff, backoff_max=30.0),
                )  # fmt: skip

            def run_it(one):
                batches = way == "batches"
                limits = {"max_records": 1, "max_wait": 0.05}  # only a record that is alone uses up its attempts
                work = one.run_batches(handle, **limits) if batches else one.run(handle, handle_signals=False)
                return asyncio.create_task(work)

            first = consumer(30.0)
            running = run_it(first)
            await until(lambda: attempts == [1], "the first failure")
            await first.stop()
            await running
            with pytest.raises(ShardStoppedError):
                await run_it(consumer(0.01))
            assert attempts == [1, 2, 3]
            assert sum(isinstance(event, events.ShardStopped) for event in happened) == 1

            with pytest.raises(ShardStoppedError):  # one that starts after the stop tries the record once (rule D4)
                await run_it(consumer(0.01))
            assert attempts == [1, 2, 3, 4]

    run(main)


@pytest.mark.parametrize("before, now, repeats", [("key", "none", False), ("none", "key", True)])
def test_a_change_of_order_is_reported_and_only_what_had_no_order_is_repeated(before, now, repeats):
    async def main():
        async with stream_world(1) as world:
            world.put("abc")
            store, seen, happened, hold = MemoryLeaseStore(), [], [], asyncio.Event()

            async def handle(record):
                if record.partition_key == "a" and not hold.is_set():
                    await hold.wait()
                seen.append(record)

            first = world.consumer(app="billing", leases=store, order=before)
            running = asyncio.create_task(first.run(handle, handle_signals=False))
            await until(lambda: len(seen) == 2, "the records beside the one that is held")
            await first.stop(deadline=0.0)
            await running
            hold.set()
            second = world.consumer(
                app="billing", leases=store, order=now, until="tip", on_event=happened.append
            )  # fmt: skip
            await second.run(handle, handle_signals=False)
            assert sorted(numbers(seen)) == ([0, 1, 1, 2, 2] if repeats else [0, 1, 2])
            (change,) = [event for event in happened if isinstance(event, events.OrderChanged)]
            assert (change.before, change.now, change.repeats) == (before, now, repeats)
            happened.clear()
            await second.run(handle, handle_signals=False)
            assert not [event for event in happened if isinstance(event, events.OrderChanged)]

    run(main)
