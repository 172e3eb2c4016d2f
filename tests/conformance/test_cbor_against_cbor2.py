"""cbor2 and our CBOR codec agree, except for tag 1: AWS puts milliseconds there, RFC 8949 seconds."""

import cbor2
import pytest
from hypothesis import given, strategies as st

from anabranch.local import cbor
from anabranch.local.state.identifiers import Timestamp

SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(1 << 64), (1 << 64) - 1),
    st.floats(allow_nan=False),
    st.binary(max_size=300),
    st.text(st.characters(codec="utf-8"), max_size=50),
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=5) | st.dictionaries(st.text(st.characters(codec="utf-8")), inner, max_size=5)
    ),
    max_leaves=20,
)


@given(VALUES)
def test_each_reads_what_the_other_wrote(value):
    assert cbor2.loads(cbor.encode(value)) == value
    assert cbor.decode(cbor2.dumps(value)) == value


@given(VALUES)
def test_short_floats_and_sorted_keys_are_read(value):
    assert cbor.decode(cbor2.dumps(value, canonical=True)) == value


@pytest.mark.parametrize("milliseconds", [0, 1, -1, 1_701_760_153_593, 253_402_300_799_999])
def test_a_timestamp_is_tag_1_with_milliseconds(milliseconds):
    timestamp = Timestamp.from_milliseconds(milliseconds)
    tagged = cbor2.dumps(cbor2.CBORTag(1, milliseconds))
    assert cbor.encode(timestamp) == tagged
    assert cbor.decode(tagged) == timestamp
