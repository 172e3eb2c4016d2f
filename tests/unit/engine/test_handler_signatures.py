"""What a handler is called with, by the parameters that it has."""

import asyncio
import functools

import pytest

from anabranch import Context
from anabranch._engine.handler_calls import HandlerCall
from anabranch.errors import ConfigurationError

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


def plain(record, context=None):
    raise AssertionError(record, context)


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


def test_a_handler_with_a_place_for_a_context_is_refused_for_processes():
    with pytest.raises(ConfigurationError, match="takes only the record"):
        HandlerCall(plain, threads=1, processes=1)
