import math
from collections.abc import Callable
from typing import Any

import pytest

from anabranch.errors import CodecError
from anabranch.local import cbor
from anabranch.local.bodies import JSON
from anabranch.local.state.identifiers import Timestamp

# RFC 8949, appendix A, as far as AWS's bodies use it.
VALUES: list[tuple[str, Any]] = [
    ("00", 0),
    ("17", 23),
    ("1818", 24),
    ("1903e8", 1000),
    ("1a000f4240", 1_000_000),
    ("1b000000e8d4a51000", 1_000_000_000_000),
    ("1bffffffffffffffff", 18446744073709551615),
    ("3bffffffffffffffff", -18446744073709551616),
    ("20", -1),
    ("3903e7", -1000),
    ("f4", False),
    ("f5", True),
    ("f6", None),
    ("fb3ff199999999999a", 1.1),
    ("40", b""),
    ("4401020304", b"\x01\x02\x03\x04"),
    ("60", ""),
    ("62c3bc", "\u00fc"),
    ("64f0908591", "\U00010151"),
    ("80", []),
    ("83010203", [1, 2, 3]),
    ("a0", {}),
    ("a26161016162820203", {"a": 1, "b": [2, 3]}),
]

READ_ONLY: list[tuple[str, Any]] = [
    ("f7", None),
    ("f93c00", 1.0),
    ("f97bff", 65504.0),
    ("fa47c35000", 100000.0),
    ("f97c00", math.inf),
    ("5f42010243030405ff", b"\x01\x02\x03\x04\x05"),
    ("7f657374726561646d696e67ff", "streaming"),
    ("9fff", []),
    ("9f018202039f0405ffff", [1, [2, 3], [4, 5]]),
    ("bf61610161629f0203ffff", {"a": 1, "b": [2, 3]}),
    ("1800", 0),
    ("a17f6161ff01", {"a": 1}),
]


@pytest.mark.parametrize("text, value", VALUES)
def test_examples_of_the_standard_are_decoded_and_encoded(text: str, value: Any) -> None:
    assert cbor.decode(bytes.fromhex(text)) == value
    assert type(cbor.decode(bytes.fromhex(text))) is type(value)
    assert cbor.encode(value).hex() == text


@pytest.mark.parametrize("text, value", READ_ONLY)
def test_forms_that_the_encoder_never_writes_are_decoded(text: str, value: Any) -> None:
    assert cbor.decode(bytes.fromhex(text)) == value


def test_a_nan_is_read() -> None:
    assert math.isnan(cbor.decode(bytes.fromhex("f97e00")))


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_any_buffer_is_decoded_and_not_kept(kind: Callable[[bytes], Any]) -> None:
    body = bytearray(cbor.encode({"Data": b"payload"}))
    value = cbor.decode(kind(body))
    body[:] = b"\0" * len(body)
    assert value == {"Data": b"payload"}


def test_a_timestamp_is_milliseconds_under_tag_1() -> None:
    timestamp = Timestamp(1_701_760_153.593)
    assert cbor.encode(timestamp).hex() == "c11b0000018c38cf37f9"
    read = cbor.decode(cbor.encode(timestamp))
    assert isinstance(read, Timestamp)
    assert read == timestamp
    assert read.milliseconds == 1_701_760_153_593


def test_a_timestamp_of_fractional_milliseconds_is_read() -> None:
    assert cbor.decode(bytes.fromhex("c1fb4024000000000000")) == Timestamp(0.01)


def test_a_timestamp_is_a_number_of_seconds_in_json() -> None:
    assert JSON.encode([Timestamp(1.25)]) == b"[1.25]"


def test_a_tuple_is_written_as_a_list() -> None:
    assert cbor.decode(cbor.encode((1, 2))) == [1, 2]


@pytest.mark.parametrize(
    "text, reason",
    [
        ("", "middle of a value"),
        ("82 01", "middle of a value"),
        ("a1 6161", "middle of a value"),
        ("9f 01", "middle of a value"),
        ("5f 4101", "middle of a value"),
        ("19 01", "passes the end"),
        ("44 0102", "passes the end"),
        ("fb 00", "passes the end"),
        ("5b ffffffffffffffff 00", "passes the end"),
        ("01 01", "1 bytes after"),
        ("62 c328", "not UTF-8"),
        ("7f 61c3 61bc ff", "not UTF-8"),
        ("7f 4161 ff", "invalid chunk"),
        ("7f 7f 6161 ff ff", "invalid chunk"),
        ("a1 01 02", "not text: int"),
        ("a1 4161 02", "not text: bytes"),
        ("1c", "reserved"),
        ("1f", "AWS does not use"),
        ("3f", "AWS does not use"),
        ("c0 6161", "AWS does not use"),
        ("c1 6161", "holds a str"),
        ("c1 f5", "holds a bool"),
        ("c1 c1 01", "holds a Timestamp"),
        ("c1 f97e00", "year 10000"),
        ("c1 1bffffffffffffffff", "year 10000"),
        ("ff", "31 is a break"),
        ("81 ff", "31 is a break"),
        ("e0", "simple value 0"),
        ("f8 20", "simple value 24"),
    ],
)
def test_invalid_cbor_is_rejected_with_the_reason(text: str, reason: str) -> None:
    with pytest.raises(CodecError, match=reason):
        cbor.decode(bytes.fromhex(text))


@pytest.mark.parametrize("opening", [b"\x81", b"\x9f", b"\xa1\x61a", b"\xc1"])
def test_nesting_is_limited(opening: bytes) -> None:
    with pytest.raises(CodecError, match="nested deeper than 32"):
        cbor.decode(opening * 100_000)


def test_the_deepest_value_that_can_be_encoded_can_be_decoded() -> None:
    value: Any = 1
    for _ in range(cbor.DEPTH_MAX):
        value = [value]
    assert cbor.decode(cbor.encode(value)) == value
    with pytest.raises(CodecError, match="nested deeper"):
        cbor.encode([value])


def test_the_number_of_items_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cbor, "ITEMS_MAX", 1000)
    with pytest.raises(CodecError, match="items"):
        cbor.decode(b"\x9f" + b"\x80" * (cbor.ITEMS_MAX + 1) + b"\xff")
    with pytest.raises(CodecError, match="items"):
        cbor.decode(b"\x5f" + b"\x40" * (cbor.ITEMS_MAX + 1) + b"\xff")


@pytest.mark.parametrize(
    "value, reason",
    [
        (1 << 64, "too large for CBOR"),
        (-1 - (1 << 64), "too large for CBOR"),
        ("\ud800", "not valid Unicode"),
        (1j, "complex"),
    ],
)
def test_values_that_cbor_cannot_hold_are_not_encoded(value: Any, reason: str) -> None:
    with pytest.raises(CodecError, match=reason):
        cbor.encode(value)
