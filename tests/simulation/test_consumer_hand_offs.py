"""A shard that another worker asks for while its handler does not end: kept, or given away once nothing of it runs."""

import asyncio
import contextlib

import pytest

from anabranch import Retry, events
from two_workers import TwoWorkers, check_forced_hand_off, reason

from simulated_stream import numbers, run, stream_world, until


def test_a_shard_whose_handler_does_not_end_is_kept_and_nothing_is_repeated():
    async def main():
        async with stream_world(2) as world:
            go_on, seen = asyncio.Event(), []

            async def handle(record):
                await go_on.wait()
                seen.append(record)

            async with TwoWorkers(world, "keep", handle) as workers:
                await workers.join()
                await until(lambda: bool(workers.said(events.HandOffKept)), "the word that it stays")
                go_on.set()
                await until(lambda: len(seen) == 3, "all records")
                assert workers.said(events.HandOffKept)[0].running_count == 1
                assert not workers.said(events.HandOffForced)
            assert numbers(seen) == [0, 1, 2]
            assert not workers.others

    run(main)


def test_a_shard_that_stops_while_it_is_handed_over_stays_with_the_worker_that_knows_it():
    async def main():
        async with stream_world(2) as world:
            go_on = asyncio.Event()

            async def handle(_):
                await go_on.wait()
                raise RuntimeError("poison")

            async with TwoWorkers(world, "keep", handle, on_failure=Retry(attempts=1)) as workers:
                await workers.join()

                def phases():
                    return [shard.phase for shard in workers.first.status().shards]

                await until(lambda: "draining" in phases(), "the hand-over")
                go_on.set()
                await until(lambda: bool(workers.said(events.ShardStopped)), "the stop")
                await until(lambda: "stopped" in phases(), "the stopped shard")
                assert not workers.said(events.LeaseGiven)
                assert not workers.said(events.HandOffKept)
            assert not workers.others

    run(main)


@pytest.mark.parametrize("by_batch", [False, True])
def test_a_forced_hand_off_cancels_what_runs_and_repeats_it_elsewhere(by_batch):
    async def main():
        async with stream_world(2) as world:
            running, cancelled = [], []

            async def handle(_):
                running.append(None)
                try:
                    await asyncio.Event().wait()
                except asyncio.CancelledError:
                    cancelled.append(None)
                    raise

            async with TwoWorkers(world, "force", handle, by_batch=by_batch) as workers:
                await until(lambda: bool(running), "the first call")
                await workers.join()
                await until(lambda: len(workers.others) == 3, "the records, in the other worker's hands")
                forced = workers.said(events.HandOffForced)
                assert [(event.running_count, event.to_member) for event in forced] == [
                    (1, workers.second.status().member_id)
                ]
                assert len(workers.said(events.LeaseGiven)) == 1
            assert len(cancelled) == 1
            assert numbers(workers.others) == [0, 1, 2]

    run(main)


def test_a_forced_hand_off_waits_for_a_call_that_ignores_its_cancellation():
    async def main():
        async with stream_world(2) as world:
            go_on, running, effects = asyncio.Event(), [], []

            async def handle(record):
                running.append(record)
                await wait_and_ignore_cancellation(go_on)
                effects.append(("first", int(record.data)))

            await check_forced_hand_off(world, handle, running, effects, go_on)

    run(main)


def test_a_forced_hand_off_for_a_worker_that_left_is_called_off():
    async def main():
        async with stream_world(2) as world:
            go_on, seen = asyncio.Event(), []

            async def handle(record):
                await wait_and_ignore_cancellation(go_on)
                seen.append(record)

            async with TwoWorkers(world, "force", handle) as workers:
                await workers.join()
                await until(lambda: bool(workers.said(events.HandOffForced)), "the word that it is forced")
                await workers.second.stop()
                await until(lambda: bool(workers.said(events.HandOffKept)), "the word that it stays")
                assert reason(workers.first) is None
                go_on.set()
                await until(lambda: len(seen) == 3, "all records, here")

    run(main)


async def wait_and_ignore_cancellation(event):
    while not event.is_set():
        with contextlib.suppress(asyncio.CancelledError):
            await event.wait()
