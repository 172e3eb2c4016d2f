"""How records are decoded before a handler sees them."""

import pytest

from anabranch._engine.handling.handling import Handling, UndecodableError
from anabranch.policies import Retry
from shard_records import make_record


def handling(decode):
    return Handling(order="shard", concurrency=1, decode=decode, policy=Retry())


def test_the_value_is_what_the_decoder_makes_of_the_data_and_the_rest_stays():
    (record,) = handling(bytes.decode).decode_all([make_record(1, data=b"text")])
    assert record.value == "text"
    assert (record.data, record.sequence_number) == (b"text", "1")


def test_without_a_decoder_records_are_handed_on_as_they_are_in_a_list_of_its_own():
    records = [make_record(1)]
    handed_on = handling(None).decode_all(records)
    assert handed_on[0] is records[0]
    handed_on.clear()
    assert len(records) == 1


def test_of_several_records_the_one_that_does_not_decode_is_named():
    records = [make_record(number, data=data) for number, data in enumerate([b"1", b"2", b"\xff", b"\xfe"])]
    with pytest.raises(UndecodableError, match="record 2 does not decode") as raised:
        handling(bytes.decode).decode_all(records)
    assert raised.value.record is records[2]
    assert isinstance(raised.value.cause, UnicodeDecodeError)
