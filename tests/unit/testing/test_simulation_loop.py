import asyncio
import contextlib
import subprocess
import sys
import time

import pytest

from anabranch.testing.loop import Deadlock, NotInSimulation, SimulationLoop, TooManySteps, run


def test_hours_pass_in_no_time():
    async def main():
        await asyncio.sleep(3_600)
        return asyncio.get_running_loop().time()

    began = time.process_time()
    assert run(main) == 3_600.0
    assert time.process_time() - began < 1.0


def test_timers_fire_in_the_order_of_their_times():
    async def main():
        fired = []
        async with asyncio.TaskGroup() as group:
            for delay in (3, 1, 2):
                group.create_task(_note(fired, delay))
        return fired

    async def _note(fired, delay):
        await asyncio.sleep(delay)
        fired.append(delay)

    assert run(main) == [1, 2, 3]


def test_task_groups_timeouts_queues_and_locks_work():
    async def main():
        queue, lock, got = asyncio.Queue(1), asyncio.Lock(), []

        async def produce():
            for item in range(5):
                await queue.put(item)

        async def consume():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(10):
                    while True:
                        item = await queue.get()
                        async with lock:
                            got.append(item)

        async with asyncio.TaskGroup() as group:
            group.create_task(produce())
            group.create_task(consume())
        return got, asyncio.get_running_loop().time()

    assert run(main) == ([0, 1, 2, 3, 4], 10.0)


LOST_UPDATE = """
import asyncio
async def main():
    seen = []
    async def worker(name):
        for step in range(3):
            await asyncio.sleep(0)
            seen.append(name + str(step))
    async with asyncio.TaskGroup() as group:
        for name in "abcdef":
            group.create_task(worker(name))
    async def fail():
        raise RuntimeError
    async def wait_and_note(number):
        try:
            await asyncio.sleep(99)
        finally:
            seen.append(number)
    try:
        async with asyncio.TaskGroup() as group:
            for number in range(400):
                group.create_task(wait_and_note(number))
            await asyncio.sleep(1)
            group.create_task(fail())
    except* RuntimeError:
        pass
    return seen
from anabranch.testing.loop import run
print(run(main, seed=7, order="shuffle"))
"""


def test_the_same_seed_gives_the_same_run_in_every_process():
    runs = [
        subprocess.run(
            [sys.executable, "-c", LOST_UPDATE],
            capture_output=True,
            text=True,
            check=True,
            env={"PYTHONHASHSEED": hash_seed},
        ).stdout
        for hash_seed in ("0", "1")
    ]
    assert runs[0] == runs[1]
    assert runs[0].count(",") > 400


async def _relies_on_order():
    """Two tasks that are right only if the first one always runs first."""
    connection = {}

    async def connect():
        await asyncio.sleep(0)
        connection["open"] = True

    async def use():
        await asyncio.sleep(0)
        return connection.get("open", False)

    first = asyncio.ensure_future(connect())
    second = asyncio.ensure_future(use())
    await first
    return await second


def test_shuffle_finds_code_that_relies_on_an_order_by_accident():
    assert all(run(_relies_on_order, seed=seed) for seed in range(20))
    assert not all(run(_relies_on_order, seed=seed, order="shuffle") for seed in range(20))


def test_a_deadlock_names_the_waiting_tasks_and_their_lines():
    async def main():
        await asyncio.create_task(wait_for_nobody(), name="the waiter")

    async def wait_for_nobody():
        await asyncio.get_running_loop().create_future()

    with pytest.raises(Deadlock, match=r"(?s)at 0\.000 s.*the waiter waits in .*wait_for_nobody, .*\.py:\d+"):
        run(main)


def test_a_loop_that_never_waits_is_ended():
    async def main():
        while True:  # noqa: ASYNC110 -- the mistake that is to be found
            await asyncio.sleep(0)

    with pytest.raises(TooManySteps, match="1000 steps"):
        run(main, loop=SimulationLoop(steps_max=1_000))


@pytest.mark.parametrize(
    "forbidden",
    [
        lambda loop: loop.run_in_executor(None, print),
        lambda loop: loop.call_soon_threadsafe(print),
        lambda loop: asyncio.to_thread(print),
        lambda loop: asyncio.open_connection("127.0.0.1", 80),
        lambda loop: asyncio.start_server(print, "127.0.0.1", 0),
    ],
)
def test_threads_and_sockets_are_refused(forbidden):
    async def main():
        await forbidden(asyncio.get_running_loop())

    with pytest.raises(NotInSimulation):
        run(main)


def test_what_was_left_running_is_cancelled():
    ended = []

    async def leave_me():
        try:
            await asyncio.sleep(1_000)
        finally:
            ended.append(True)

    async def main():
        task = asyncio.ensure_future(leave_me())
        await asyncio.sleep(1)
        return task.done()

    assert run(main) is False
    assert ended == [True]


def test_callbacks_that_the_gate_keeps_run_when_they_are_given_back():
    loop = SimulationLoop()
    kept = []

    async def main():
        order = []
        loop.gate = lambda handle: handle._callback != order.append or bool(kept.append(handle))
        loop.call_soon(order.append, "kept")
        await asyncio.sleep(0)
        order.append("first")
        loop.gate = None
        loop.resume(kept.pop())
        await asyncio.sleep(0)
        return order

    assert run(main, loop=loop) == ["first", "kept"]
