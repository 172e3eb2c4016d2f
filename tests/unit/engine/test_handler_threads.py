"""Threads of a plain handler: each call ends in its own result or error, and no thread outlives its use."""

import asyncio
import contextvars
import threading

import pytest

from anabranch._engine.handler_calls import HandlerThreads

NAME = contextvars.ContextVar("NAME", default="nobody")


def raises(error):
    def call():
        raise error

    return call


def test_a_call_sees_the_context_variables_of_its_caller():
    async def main():
        threads = HandlerThreads(1)
        NAME.set("billing")
        assert await threads.begin(NAME.get) == "billing"
        threads.close()

    asyncio.run(main())


@pytest.mark.parametrize("error", [KeyError("a"), asyncio.CancelledError("handler's own")])
def test_what_a_call_raises_is_raised_where_it_is_awaited_and_the_thread_continues(error):
    async def main():
        threads = HandlerThreads(1)
        with pytest.raises(type(error)) as raised:
            await threads.begin(raises(error))
        assert raised.value is error
        assert await threads.begin(lambda: "next") == "next"
        threads.close()

    asyncio.run(main())


def test_an_exit_in_a_thread_ends_the_program_and_not_the_thread():
    async def main():
        threads = HandlerThreads(1)
        try:
            await threads.begin(raises(SystemExit(3)))
        finally:
            threads.close()

    with pytest.raises(SystemExit) as ended:
        asyncio.run(main())
    assert ended.value.code == 3


def test_threads_are_started_as_they_are_needed():
    async def main():
        threads = HandlerThreads(2)
        one_after_another = {await threads.begin(threading.get_ident) for _ in range(5)}
        assert len(one_after_another) == 1
        both = threading.Barrier(2)
        assert sorted(await asyncio.gather(threads.begin(both.wait), threads.begin(both.wait))) == [0, 1]
        at_once = await asyncio.gather(*(threads.begin(threading.current_thread) for _ in range(20)))
        assert len(set(at_once)) <= 2
        assert all(thread.daemon for thread in at_once)
        threads.close()

    asyncio.run(main())


def test_closing_ends_the_threads_and_makes_no_call_that_waits():
    async def main():
        threads, has_begun, may_end, made = HandlerThreads(1), threading.Event(), threading.Event(), []
        thread = await threads.begin(threading.current_thread)
        running = threads.begin(lambda: has_begun.set() or may_end.wait(10))
        waiting = threads.begin(lambda: made.append(1))
        has_begun.wait(10)
        threads.close()
        threads.close()
        assert waiting.cancelled()
        with pytest.raises(RuntimeError, match="closed"):
            threads.begin(int)
        may_end.set()
        assert await running
        thread.join(5)
        assert not thread.is_alive()
        assert made == []

    asyncio.run(main())


def test_a_call_may_outlive_the_loop_that_began_it():
    threads, may_end = HandlerThreads(1), threading.Event()

    async def main():
        thread = await threads.begin(threading.current_thread)
        threads.begin(lambda: may_end.wait(10))
        return thread

    thread = asyncio.run(main())
    threads.close()
    may_end.set()
    thread.join(5)
    assert not thread.is_alive()
