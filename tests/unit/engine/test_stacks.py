"""Stacks of calls that do not end: in threads, in coroutines that wait, and in one that blocks its loop."""

import asyncio
import threading
import types

import pytest

from anabranch._engine.handler_calls import coroutine_stack, place_in, task_stack, thread_stack

from stream_world import run


async def wait_inside(event):
    await event.wait()


async def handle(event):
    await wait_inside(event)


@types.coroutine
def older_kind(event):
    yield from wait_inside(event).__await__()


def names(stack):
    return [frame.name for frame in stack]


def test_a_coroutine_that_waits_is_followed_to_where_it_waits():
    async def main():
        event = asyncio.Event()
        task = asyncio.create_task(handle(event))
        await asyncio.sleep(0)
        assert names(task_stack(task)) == ["handle", "wait_inside", "wait"]
        assert place_in(task_stack(task)).startswith("handle (test_stacks.py:")
        event.set()
        await task
        assert names(task_stack(task)) == []

    run(main, 5)


def test_a_coroutine_of_a_generator_is_followed_as_far_as_it_can_be_seen():
    async def main():
        event = asyncio.Event()

        async def outer():
            await older_kind(event)

        task = asyncio.create_task(outer())
        await asyncio.sleep(0)
        assert names(task_stack(task))[:2] == ["outer", "older_kind"]
        event.set()
        await task

    run(main, 5)


def test_what_a_coroutine_that_runs_has_called_is_seen_from_another_thread():
    async def main():
        found = []

        def block():
            watcher = threading.Thread(target=lambda: found.append(coroutine_stack(coroutine)))
            watcher.start()
            watcher.join()

        async def blocking():
            block()

        coroutine = blocking()
        await coroutine
        assert names(found[0])[:2] == ["blocking", "block"]

    run(main, 5)


def test_a_thread_is_shown_without_what_started_it():
    started, ended = threading.Event(), threading.Event()

    def work():
        started.set()
        ended.wait()

    thread = threading.Thread(target=work)
    thread.start()
    started.wait()
    assert names(thread_stack(thread.ident))[0] == "work"
    ended.set()
    thread.join()


@pytest.mark.parametrize("stack", [thread_stack(None), task_stack(None), coroutine_stack(object())])
def test_what_cannot_be_found_is_an_empty_stack(stack):
    assert names(stack) == []
    assert place_in(stack) == "an unknown place"
