"""Law: what is written as CBOR is read back equal, and any legal spelling of the same value reads the same."""

import math
import struct
from typing import Any

from hypothesis import given, strategies as st

from anabranch.local import cbor
from anabranch.local.state.identifiers import Timestamp

timestamps = st.integers(-62_135_596_800_000, 253_402_300_799_999).map(Timestamp.from_milliseconds)
scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(1 << 64), (1 << 64) - 1),
    st.floats(allow_nan=False),
    st.binary(max_size=50),
    st.text(st.characters(codec="utf-8"), max_size=50),
    timestamps,
)
values = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=5) | st.dictionaries(st.text(st.characters(codec="utf-8")), inner, max_size=5)
    ),
    max_leaves=20,
)


def kinds(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: kinds(member) for key, member in value.items()}
    return [kinds(item) for item in value] if isinstance(value, list) else type(value)


@given(values)
def test_a_value_that_is_written_is_read_back(value) -> None:
    read = cbor.decode(cbor.encode(value))
    assert read == value
    assert kinds(read) == kinds(value)


def head(major: int, argument: int, width: int) -> bytes:
    return struct.pack(">B" + "BHIQ"[width], major << 5 | 24 + width, argument)


def spelled(value: Any, draw: Any) -> bytes:
    """The value in a form that our writer never chooses: wide arguments, indefinite lengths, strings in chunks."""
    indefinite = draw(st.booleans())
    if isinstance(value, dict):
        inner = b"".join(spelled(key, draw) + spelled(member, draw) for key, member in value.items())
        return b"\xbf" + inner + b"\xff" if indefinite else head(5, len(value), 3) + inner
    if isinstance(value, list):
        inner = b"".join(spelled(item, draw) for item in value)
        return b"\x9f" + inner + b"\xff" if indefinite else head(4, len(value), draw(st.integers(0, 3))) + inner
    if isinstance(value, str):
        if indefinite:
            chunks = b"".join(
                head(3, len(encoded), 1) + encoded for encoded in (character.encode() for character in value)
            )
            return b"\x7f" + chunks + b"\xff"
        return head(3, len(value.encode()), 2) + value.encode()
    if isinstance(value, bytes):
        cut = draw(st.integers(0, len(value)))
        chunks = head(2, cut, 3) + value[:cut] + head(2, len(value) - cut, 1) + value[cut:]
        return b"\x5f" + chunks + b"\xff" if indefinite else head(2, len(value), 3) + value
    if isinstance(value, int) and not isinstance(value, bool):
        return head(0, value, 3) if value >= 0 else head(1, -1 - value, 3)
    return cbor.encode(value)


@given(values, st.data())
def test_every_legal_spelling_reads_the_same(value, data) -> None:
    assert cbor.decode(spelled(value, data.draw)) == value


@given(st.floats(width=16) | st.floats(width=32))
def test_narrow_floats_are_read_exactly(value) -> None:
    for code, layout in ((0xF9, ">e"), (0xFA, ">f"), (0xFB, ">d")):
        try:
            narrow = struct.pack(layout, value)
        except OverflowError:
            continue
        if struct.unpack(layout, narrow)[0] == value or math.isnan(value):
            read = cbor.decode(bytes([code]) + narrow)
            assert read == value or (math.isnan(read) and math.isnan(value))
