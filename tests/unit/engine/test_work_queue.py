"""Which session is served next, and which waiter is woken."""

import asyncio
from types import SimpleNamespace

from anabranch._engine.work_queue import WorkQueue
from anabranch.testing import ManualClock
from held_sessions import make_session, read
from shard_records import plain


class World:
    """A queue, and sessions with three records each."""

    def __init__(self, count=1, *, one_at_a_time=False, may_start=True):
        self.may_start = may_start
        fleet = SimpleNamespace(may_start=lambda *_: self.may_start)
        scheduler = SimpleNamespace(call_at=lambda *_: None)
        changes = SimpleNamespace(finished=lambda session: None)
        clock = ManualClock()
        self.queue = WorkQueue(clock, scheduler, fleet, changes, one_at_a_time)
        self.sessions = [make_session(number, order="none") for number in range(count)]
        for session in self.sessions:
            read(session, plain(1), plain(2), plain(3))
            self.queue.offer(session)

    def take(self):
        """The number of the shard that delivers next."""
        work = self.queue.next()
        return None if work is None else self.sessions.index(work.session)


async def waiting(queue, count):
    """Tasks that wait for a ready session."""
    tasks = [asyncio.create_task(queue.wait()) for _ in range(count)]
    await asyncio.sleep(0)
    return tasks


async def count_woken(tasks):
    for _ in range(3):  # passing a wake-up on takes another step of the loop
        await asyncio.sleep(0)
    woken = sum(task.done() for task in tasks)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    return woken


def test_sessions_are_served_in_turn():
    world = World(3)
    assert [world.take() for _ in range(7)] == [0, 1, 2, 0, 1, 2, 0]


def test_a_session_that_has_no_work_leaves_the_queue_until_it_is_offered_again():
    world = World()
    assert [world.take() for _ in range(4)] == [0, 0, 0, None]
    read(world.sessions[0], plain(4))
    assert world.take() is None
    world.queue.offer(world.sessions[0])
    assert world.take() == 0


def test_what_is_delivered_one_at_a_time_is_followed_only_after_it_is_offered_again():
    world = World(one_at_a_time=True)
    assert [world.take(), world.take()] == [0, None]
    world.queue.put_back(world.sessions[0])
    assert world.take() == 0


def test_a_session_that_is_withdrawn_held_or_draining_is_not_served():
    world = World(3)
    world.queue.withdraw(world.sessions[0])
    world.queue.hold(world.sessions[1])
    world.sessions[2].drain()
    assert world.take() is None
    world.queue.release(world.sessions[1])
    world.queue.offer(world.sessions[1])
    assert world.take() == 1


def test_nothing_is_delivered_behind_the_fence_and_all_of_it_afterwards():
    world = World(may_start=False)
    assert world.take() is None
    world.may_start = True
    assert world.take() == 0


def test_an_offer_wakes_one_waiter_and_it_wakes_the_next_if_there_is_more():
    async def main():
        world = World(2, one_at_a_time=True)
        tasks = await waiting(world.queue, 3)
        world.queue.offer(world.sessions[0])
        assert [world.take(), world.take()] == [0, 1]
        assert await count_woken(tasks) == 2

    asyncio.run(main())


def test_putting_back_wakes_no_waiter_because_the_caller_checks_again():
    async def main():
        queue = World(0).queue
        tasks = await waiting(queue, 2)
        queue.put_back(make_session())
        assert await count_woken(tasks) == 0

    asyncio.run(main())


def test_a_waiter_that_is_cancelled_in_its_turn_passes_it_on():
    async def main():
        queue = World(0).queue
        first, second = await waiting(queue, 2)
        queue.offer(make_session())
        first.cancel()
        assert await count_woken([second]) == 1
        assert first.cancelled()

    asyncio.run(main())
