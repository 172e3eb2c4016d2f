"""The caller's own loop: what is in hand when it is left, stopped or timed, and what is then acknowledged."""

import asyncio

import pytest

from anabranch.errors import ConsumerFailedError, UsageError
from anabranch.stores.memory import MemoryLeaseStore

from simulated_stream import numbers, run, stream_world, until

WAYS = pytest.mark.parametrize("way", ["records", "batches"])


def _steps(consumer, way):
    return aiter(consumer) if way == "records" else consumer.batches(max_records=1, max_wait=0.05)


def _number(step):
    return int(getattr(step, "records", [step])[0].data)


async def _rest(world, store):
    async with world.consumer(app="billing", leases=store, until="tip") as consumer:
        return numbers([record async for record in consumer])


@WAYS
@pytest.mark.parametrize("kept", ["an iterator of the loop's", "an iterator that is kept"])
def test_a_stop_after_an_error_in_the_body_does_not_acknowledge_the_current_record(way, kept):
    async def main():
        async with stream_world(1) as world:
            world.put(["a"] * 4)
            store = MemoryLeaseStore()
            async with world.consumer(app="billing", leases=store) as consumer:
                steps = _steps(consumer, way) if kept == "an iterator that is kept" else None
                try:
                    async for step in steps or _steps(consumer, way):
                        1 / (2 - _number(step))
                except ZeroDivisionError:
                    report = await consumer.stop()
            assert numbers(report.leftovers) == [2]
            assert await _rest(world, store) == [2, 3]

    run(main)


@WAYS
def test_a_stop_after_the_loop_was_left_does_not_acknowledge_the_current_record(way):
    async def main():
        async with stream_world(1) as world:
            world.put(["a"] * 4)
            store = MemoryLeaseStore()
            async with world.consumer(app="billing", leases=store) as consumer:
                async for step in _steps(consumer, way):
                    if _number(step) == 2:
                        break
                assert numbers((await consumer.stop()).leftovers) == [2]
            assert await _rest(world, store) == [2, 3]

    run(main)


def test_a_stop_by_another_task_does_not_wait_for_a_loop_that_was_left():
    async def main():
        async with stream_world(1) as world:
            world.put(["a"])
            async with world.consumer(app="billing", leases="memory://") as consumer:
                async for _ in consumer:
                    break
                report = await asyncio.create_task(consumer.stop(deadline=60))
                assert numbers(report.leftovers) == [0]

    run(main)


@WAYS
def test_a_step_that_is_cancelled_takes_nothing_and_ends_nothing(way):
    async def main():
        async with stream_world(1) as world:
            async with world.consumer(app="billing", leases="memory://") as consumer:
                steps, seen = _steps(consumer, way), []
                for _ in range(3):  # also while the consumer starts
                    with pytest.raises(TimeoutError):
                        await asyncio.wait_for(anext(steps), 0.02)
                world.put(["a"] * 2)
                while len(seen) < 2:
                    seen.append(_number(await asyncio.wait_for(anext(steps), 5)))
                with pytest.raises(TimeoutError):
                    await asyncio.wait_for(anext(steps), 0.1)
            assert seen == [0, 1]

    run(main)


def test_an_iterator_that_was_closed_has_nothing_more():
    async def main():
        async with stream_world(1) as world:
            world.put(["a"] * 2)
            async with world.consumer(app="billing", leases="memory://") as consumer:
                steps = aiter(consumer)
                await anext(steps)
                await steps.aclose()
                with pytest.raises(StopAsyncIteration):
                    await anext(steps)
                assert numbers((await consumer.stop()).leftovers) == [0]

    run(main)


@WAYS
def test_a_loop_that_never_waits_lets_the_others_run(way):
    async def main():
        async with stream_world(1) as world:
            world.put(["a"] * 1200)
            turns, loop = [], asyncio.get_running_loop()
            async with world.consumer(app="billing", leases="memory://", until="tip") as consumer:
                steps = consumer if way == "records" else consumer.batches(max_records=600, max_wait=0)
                seen = 0
                async for step in steps:
                    seen += len(getattr(step, "records", [step]))
                    if seen == 600:
                        loop.call_soon(turns.append, None)
                    if seen == 1200:
                        assert turns
            assert seen == 1200

    run(main)


def test_a_failure_that_no_step_has_shown_is_raised_where_the_consumer_is_closed():
    async def main():
        async with stream_world(1) as world:
            world.put(["a"])
            async with world.consumer(app="billing", leases="memory://") as consumer:
                async for _ in consumer:
                    consumer._consumer_run.scheduler.call_at(0, {}.popitem)
                    await until(lambda: not consumer._consumer_run.is_running, "the failure")
                    break

    with pytest.raises(ConsumerFailedError, match="KeyError"):
        run(main)


@WAYS
def test_a_second_task_on_an_iterator_is_refused_and_acknowledges_nothing(way):
    async def main():
        async with stream_world(1) as world:
            world.put(["a"] * 4)
            store = MemoryLeaseStore()
            async with world.consumer(app="billing", leases=store) as consumer:
                steps = _steps(consumer, way)
                assert _number(await anext(steps)) == 0

                async def other():
                    return await anext(steps)

                for _ in range(2):
                    with pytest.raises(UsageError, match=r"run\(handler\).*batches\(\).*manual"):
                        await asyncio.create_task(other())
            assert await _rest(world, store) == [0, 1, 2, 3]

    run(main)


@WAYS
def test_a_second_task_is_refused_while_the_first_waits_for_a_record_which_it_then_gets(way):
    async def main():
        async with stream_world(1) as world, world.consumer(app="billing", leases="memory://") as consumer:
            steps = _steps(consumer, way)

            async def step():
                return _number(await anext(steps))

            first = asyncio.create_task(step())
            await asyncio.sleep(0)
            with pytest.raises(UsageError, match="is using this iterator"):
                await asyncio.create_task(step())
            world.put(["a"] * 2)
            assert await first == 0
            assert await asyncio.create_task(step()) == 1  # the first task has ended

    run(main)


def test_a_step_may_have_a_task_of_its_own():
    async def main():
        async with stream_world(1) as world:
            world.put(["a"] * 4)
            store, seen = MemoryLeaseStore(), []
            async with world.consumer(app="billing", leases=store, start="trim_horizon") as consumer:
                steps = aiter(consumer)
                while len(seen) < 3:
                    try:
                        seen.append(await asyncio.wait_for(anext(steps), 0.02))
                    except TimeoutError:
                        continue
            assert numbers(seen) == [0, 1, 2]
            assert await _rest(world, store) == [2, 3]

    run(main)


def test_several_tasks_share_an_iterator_where_records_are_acknowledged_by_hand():
    async def main():
        async with stream_world(1) as world:
            world.put(["a"] * 20)
            store, seen, workers = MemoryLeaseStore(), [], set()
            options = {"app": "billing", "leases": store, "acknowledge": "manual"}
            async with world.consumer(until="tip", **options) as consumer:
                steps = aiter(consumer)

                async def work(number):
                    async for record in steps:
                        workers.add(number)
                        await asyncio.sleep(0.001)
                        seen.append(record)
                        consumer.ack(record)

                await asyncio.gather(*(work(number) for number in range(3)))
            assert sorted(numbers(seen)) == list(range(20))
            assert workers == {0, 1, 2}
            assert await _rest(world, store) == []

    run(main)
