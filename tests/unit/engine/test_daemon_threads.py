"""Daemon threads: each call ends in its own result or error, and no thread outlives its use."""

import asyncio
import contextvars
import threading

import pytest

from anabranch._daemon_threads import DaemonThreads
from anabranch._engine.handler_calls import HandlerCall
from patience import PATIENCE

NAME = contextvars.ContextVar("NAME", default="nobody")


def begin(threads, call):
    return asyncio.wrap_future(threads.submit(call))


def raises(error):
    def call():
        raise error

    return call


def test_a_handler_sees_the_context_variables_of_its_caller():
    async def main():
        seen = []
        call = HandlerCall(lambda _: seen.append(NAME.get()), threads=1)
        NAME.set("billing")
        await call(None, None, lambda: True)
        call.close()
        assert seen == ["billing"]

    asyncio.run(main())


@pytest.mark.parametrize("error", [KeyError("a"), asyncio.CancelledError("handler's own")])
def test_what_a_call_raises_is_raised_where_it_is_awaited_and_the_thread_continues(error):
    async def main():
        threads = DaemonThreads(1, "test")
        with pytest.raises(type(error)) as raised:
            await begin(threads, raises(error))
        assert raised.value is error
        assert await begin(threads, lambda: "next") == "next"
        threads.shutdown()

    asyncio.run(main())


def test_an_exit_in_a_thread_ends_the_program_and_not_the_thread():
    async def main():
        threads = DaemonThreads(1, "test")
        try:
            await begin(threads, raises(SystemExit(3)))
        finally:
            threads.shutdown()

    with pytest.raises(SystemExit) as ended:
        asyncio.run(main())
    assert ended.value.code == 3


def test_threads_are_started_as_they_are_needed():
    async def main():
        threads = DaemonThreads(2, "test")
        one_after_another = {await begin(threads, threading.get_ident) for _ in range(5)}
        assert len(one_after_another) == 1
        both = threading.Barrier(2)
        assert sorted(await asyncio.gather(begin(threads, both.wait), begin(threads, both.wait))) == [0, 1]
        at_once = await asyncio.gather(*(begin(threads, threading.current_thread) for _ in range(20)))
        assert len(set(at_once)) <= 2
        assert all(thread.daemon for thread in at_once)
        threads.shutdown()

    asyncio.run(main())


def test_threads_that_were_started_in_advance_are_all_used():
    threads, both = DaemonThreads(2, "test"), threading.Barrier(2)
    threads.start()
    calls = [threads.submit(both.wait), threads.submit(both.wait)]
    assert sorted(call.result(10) for call in calls) == [0, 1]
    threads.shutdown()


def test_a_call_that_was_cancelled_before_it_began_leaves_its_thread_idle():
    threads, may_end = DaemonThreads(2, "test"), threading.Event()
    running = [threads.submit(may_end.wait, 10) for _ in range(2)]
    waiting = [threads.submit(int) for _ in range(2)]
    assert all(call.cancel() for call in waiting)
    may_end.set()
    assert all(call.result(10) for call in running)
    both = threading.Barrier(2)
    calls = [threads.submit(both.wait), threads.submit(both.wait)]
    assert sorted(call.result(10) for call in calls) == [0, 1]
    threads.shutdown()


def test_a_shutdown_ends_the_threads_and_makes_no_call_that_waits():
    async def main():
        threads, has_begun, may_end, made = DaemonThreads(1, "test"), threading.Event(), threading.Event(), []
        thread = await begin(threads, threading.current_thread)
        running = begin(threads, lambda: has_begun.set() or may_end.wait(PATIENCE))
        waiting = begin(threads, lambda: made.append(1))
        has_begun.wait(PATIENCE)
        threads.shutdown(cancel_futures=True)
        threads.shutdown(cancel_futures=True)
        with pytest.raises(asyncio.CancelledError):
            await waiting
        with pytest.raises(RuntimeError, match="after shutdown"):
            threads.submit(int)
        may_end.set()
        assert await running
        thread.join(PATIENCE)
        assert not thread.is_alive()
        assert made == []

    asyncio.run(main())


def test_a_call_may_outlive_the_loop_that_began_it():
    threads, may_end = DaemonThreads(1, "test"), threading.Event()

    async def main():
        thread = await begin(threads, threading.current_thread)
        begin(threads, lambda: may_end.wait(PATIENCE))
        return thread

    thread = asyncio.run(main())
    threads.shutdown(cancel_futures=True)
    may_end.set()
    thread.join(PATIENCE)
    assert not thread.is_alive()
