"""The parts of a handler call: decoding, the handler's signature, the text of an error, where a call stands."""

import asyncio
import functools
import threading
import types

import pytest

from anabranch import Context
from anabranch._core.handling.failures import CHARACTERS_MAX, error_text
from anabranch._engine.handler_calls import (
    HandlerCall,
    HandlerOptions,
    coroutine_stack,
    describe_stack,
    task_stack,
    thread_stack,
)
from anabranch.errors import ConfigurationError
from anabranch.policies import Retry
from shard_records import make_record

from stream_world import run


def options_with(decode):
    return HandlerOptions(order="shard", concurrency=1, decode=decode, policy=Retry())


def test_the_value_is_what_the_decoder_makes_of_the_data_and_the_rest_stays():
    (record,), error = options_with(bytes.decode).decode_leading([make_record(1, data=b"text")])
    assert error is None
    assert record.value == "text"
    assert (record.data, record.sequence_number) == (b"text", "1")


def test_without_a_decoder_records_are_handed_on_as_they_are_in_a_list_of_its_own():
    records = [make_record(1)]
    handed_on, _ = options_with(None).decode_leading(records)
    assert handed_on[0] is records[0]
    handed_on.clear()
    assert len(records) == 1


def test_of_several_records_those_before_the_first_that_does_not_decode_are_handed_on():
    records = [make_record(number, data=data) for number, data in enumerate([b"1", b"2", b"\xff", b"\xfe"])]
    decoded, error = options_with(bytes.decode).decode_leading(records)
    assert [record.value for record in decoded] == ["1", "2"]
    assert str(error) == "record 2 does not decode"
    assert error.record is records[2]
    assert isinstance(error.cause, UnicodeDecodeError)


CONTEXT = Context(attempt=1, fence_token=7)


class Handlers:
    async def method(self, record, context):
        return record, context

    async def __call__(self, record, context=None):
        return record, context


async def alone(record):
    return record, None


async def with_context(record, context):
    return record, context


async def with_default(record, context=None):
    return record, context


async def with_more_defaults(record, context=None, limit=3):
    assert limit == 3
    return record, context


async def with_keyword(record, *, context=None):
    return record, context


async def with_any(record, *rest):
    return record, rest[0] if rest else None


async def three(record, context, other):
    raise AssertionError(record, context, other)


async def none():
    raise AssertionError


@pytest.mark.parametrize(
    "handler",
    [with_context, with_default, with_more_defaults, Handlers(), Handlers().method, functools.partial(three, other=1)],
)
def test_a_second_parameter_that_can_be_given_by_place_gets_the_context(handler):
    assert HandlerCall(handler, threads=1).wants_context


@pytest.mark.parametrize("handler", [with_context, with_default, with_more_defaults, Handlers(), Handlers().method])
def test_the_context_is_given_as_the_second_argument(handler):
    call = HandlerCall(handler, threads=1)
    assert asyncio.run(call("record", CONTEXT, lambda: True)) == ("record", CONTEXT)


@pytest.mark.parametrize("handler", [alone, with_keyword, with_any, functools.partial(with_default, context=None)])
def test_any_other_handler_gets_the_record_alone(handler):
    call = HandlerCall(handler, threads=1)
    assert not call.wants_context
    assert asyncio.run(call("record", None, lambda: True)) == ("record", None)


@pytest.mark.parametrize("handler, message", [(none, "this one takes none"), (three, "needs 3 parameters")])
def test_a_handler_that_cannot_be_called_is_refused(handler, message):
    with pytest.raises(ConfigurationError, match=message):
        HandlerCall(handler, threads=1)


class Mute(Exception):  # noqa: N818 -- as users name theirs
    def __str__(self):
        raise RuntimeError("no words")


@pytest.mark.parametrize(
    "error, text",
    [
        (ValueError("no such order"), "ValueError: no such order"),
        (TimeoutError(), "TimeoutError"),
        (Mute(), "Mute"),
        (OSError("no file caf\udce9.csv"), "OSError: no file caf\\udce9.csv"),
    ],
)
def test_every_error_has_a_text(error, text):
    assert error_text(error) == text
    error_text(error).encode()


def test_no_more_is_kept_than_a_row_has_room_for():
    assert error_text(ValueError("x" * 5_000_000)) == f"ValueError: {'x' * CHARACTERS_MAX}"


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
        assert describe_stack(task_stack(task)).startswith("handle (test_handler_calls.py:")
        event.set()
        await task
        assert names(task_stack(task)) == []

    run(main)


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

    run(main)


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

    run(main)


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
    assert describe_stack(stack) is None
