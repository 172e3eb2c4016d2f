"""How records are decoded before a handler sees them."""

from anabranch._engine.handler_calls import HandlerOptions
from anabranch.policies import Retry
from shard_records import make_record


def handling(decode):
    return HandlerOptions(order="shard", concurrency=1, decode=decode, policy=Retry())


def test_the_value_is_what_the_decoder_makes_of_the_data_and_the_rest_stays():
    (record,), error = handling(bytes.decode).decode_leading([make_record(1, data=b"text")])
    assert error is None
    assert record.value == "text"
    assert (record.data, record.sequence_number) == (b"text", "1")


def test_without_a_decoder_records_are_handed_on_as_they_are_in_a_list_of_its_own():
    records = [make_record(1)]
    handed_on, _ = handling(None).decode_leading(records)
    assert handed_on[0] is records[0]
    handed_on.clear()
    assert len(records) == 1


def test_of_several_records_those_before_the_first_that_does_not_decode_are_handed_on():
    records = [make_record(number, data=data) for number, data in enumerate([b"1", b"2", b"\xff", b"\xfe"])]
    decoded, error = handling(bytes.decode).decode_leading(records)
    assert [record.value for record in decoded] == ["1", "2"]
    assert str(error) == "record 2 does not decode"
    assert error.record is records[2]
    assert isinstance(error.cause, UnicodeDecodeError)
