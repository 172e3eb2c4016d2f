"""What `decode=` and `encode=` take, both ways."""

from dataclasses import dataclass
from typing import Any, NewType, TypedDict

import msgspec
import pytest

from anabranch.errors import ConfigurationError
from anabranch.values import decode_with, encode_with, json_lines


class Order(msgspec.Struct):
    item: str
    count: int


@dataclass
class Line:
    item: str


class Entry(TypedDict):
    item: str


class Model:
    """What pydantic's models look like from here."""

    def __init__(self, text):
        self.text = text

    @classmethod
    def model_validate_json(cls, data):
        return cls(data.decode())

    def model_dump_json(self):
        return self.text


CustomerId = NewType("CustomerId", int)


@pytest.mark.parametrize(
    "given, data, value",
    [
        (str, "né".encode(), "né"),
        (dict, b'{"a": 1}', {"a": 1}),
        (list[int], b"[1, 2]", [1, 2]),
        (Order, b'{"item": "pen", "count": 2}', Order("pen", 2)),
        (Line, b'{"item": "pen"}', Line("pen")),
        (Entry, b'{"item": "pen"}', {"item": "pen"}),
        (Any, b"[null]", [None]),
        (CustomerId, b"7", 7),
        (json_lines(Order), b'{"item": "a", "count": 1}\n{"item": "b", "count": 2}\n', [Order("a", 1), Order("b", 2)]),
        (json_lines(), b"1\n2", [1, 2]),
        (lambda data: data[::-1], b"abc", b"cba"),
    ],
)
def test_a_payload_becomes_what_was_asked_for(given, data, value):
    assert decode_with(given)(data) == value


def test_bytes_need_no_decoding():
    assert decode_with(bytes) is None


def test_a_pydantic_model_is_known_by_its_method():
    assert decode_with(Model)(b'{"a": 1}').text == '{"a": 1}'
    assert encode_with(Model)(Model('{"a": 1}')) == b'{"a": 1}'


@pytest.mark.parametrize(
    "given, value, data",
    [
        (bytes, b"abc", b"abc"),
        (bytes, bytearray(b"abc"), b"abc"),
        (bytes, memoryview(b"abc"), b"abc"),
        (str, "né", "né".encode()),
        (dict, {"a": 1}, b'{"a":1}'),
        (Order, Order("pen", 2), b'{"item":"pen","count":2}'),
        (json_lines(Order), [Order("a", 1), Order("b", 2)], b'{"item":"a","count":1}\n{"item":"b","count":2}\n'),
        (lambda value: value.encode(), "x", b"x"),
    ],
)
def test_a_value_becomes_bytes(given, value, data):
    assert encode_with(given)(value) == data


@pytest.mark.parametrize("given, value", [(bytes, "text"), (bytes, 7), (str, b"bytes")])
def test_a_value_of_the_wrong_kind_is_named(given, value):
    with pytest.raises(TypeError, match=type(value).__name__):
        encode_with(given)(value)


@pytest.mark.parametrize("make", [decode_with, encode_with])
def test_what_is_neither_type_nor_function_is_refused(make):
    with pytest.raises(ConfigurationError, match="7"):
        make(7)


async def async_codec(value):
    return value


class AsyncCodec:
    async def __call__(self, value):
        return value


@pytest.mark.parametrize("make", [decode_with, encode_with])
@pytest.mark.parametrize("given", [async_codec, AsyncCodec()])
def test_async_functions_and_objects_are_refused(make, given):
    with pytest.raises(ConfigurationError, match="is an async function"):
        make(given)


def test_a_type_that_json_cannot_become_is_refused_when_the_consumer_is_made():
    with pytest.raises(ConfigurationError, match="not a type that JSON"):
        decode_with(dict[Order, int] | dict[int, Order] | Order | Line)


def test_what_does_not_fit_the_type_is_an_error_of_its_payload():
    with pytest.raises(msgspec.ValidationError):
        decode_with(Order)(b'{"item": 3, "count": 2}')
