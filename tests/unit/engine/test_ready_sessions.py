"""Which session is served next, and which waiter is woken."""

import asyncio

from anabranch._engine.ready_sessions import ReadySessions


def everything(session):
    return session.upper()


def nothing(_):
    return None


async def waiting(ready, count):
    """Tasks that wait for a ready session."""
    tasks = [asyncio.create_task(ready.wait()) for _ in range(count)]
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
    ready = ReadySessions()
    for session in "abc":
        ready.offer(session)
    assert [ready.take(everything)[0] for _ in range(7)] == list("abcabca")


def test_a_session_that_has_nothing_leaves_the_shelf_until_it_is_offered_again():
    ready = ReadySessions()
    ready.offer("a")
    assert ready.take(nothing) is None
    assert ready.take(everything) is None
    ready.offer("a")
    assert ready.take(everything) == ("a", "A")


def test_what_is_handed_out_one_at_a_time_is_followed_only_after_it_is_offered_again():
    ready = ReadySessions(one_at_a_time=True)
    ready.offer("a")
    assert ready.take(everything) == ("a", "A")
    assert ready.take(everything) is None
    ready.put_back("a")
    assert ready.take(everything) == ("a", "A")


def test_a_session_that_is_withdrawn_is_not_served():
    ready = ReadySessions()
    ready.offer("a")
    ready.withdraw("a")
    ready.withdraw("b")
    assert ready.take(everything) is None


def test_an_offer_wakes_one_and_who_finds_work_wakes_the_next_if_there_is_more():
    async def main():
        ready = ReadySessions(one_at_a_time=True)
        tasks = await waiting(ready, 3)
        ready.offer("a")
        ready._ready["b"] = None
        assert ready.take(everything) == ("a", "A")
        assert ready.take(everything) == ("b", "B")
        assert await count_woken(tasks) == 2

    asyncio.run(main())


def test_who_puts_back_wakes_nobody_since_it_looks_again_itself():
    async def main():
        ready = ReadySessions()
        tasks = await waiting(ready, 2)
        ready.put_back("a")
        assert await count_woken(tasks) == 0

    asyncio.run(main())


def test_a_waiter_that_is_cancelled_in_its_turn_passes_it_on():
    async def main():
        ready = ReadySessions()
        first, second = await waiting(ready, 2)
        ready.offer("a")
        first.cancel()
        assert await count_woken([second]) == 1
        assert first.cancelled()

    asyncio.run(main())
