import base64

import pytest

import anabranch
from anabranch._wire.aggregate import AggregateBuilder
from anabranch.errors import CodecError

ARN = "arn:aws:kinesis:eu-west-1:123456789012:stream/orders"


def item(data, key="k", number="101", arn=ARN):
    return {
        "kinesis": {
            "kinesisSchemaVersion": "1.0",
            "partitionKey": key,
            "sequenceNumber": number,
            "data": base64.b64encode(data).decode(),
            "approximateArrivalTimestamp": 1545084650.987,
        },
        "eventSource": "aws:kinesis",
        "eventID": f"shardId-000000000006:{number}",
        "eventSourceARN": arn,
    }


def aggregate(*records):
    builder = AggregateBuilder()
    for key, data, hash_key in records:
        builder.add(key, data, hash_key, size_max=1 << 20)
    return builder.finish()


def test_plain_records_and_the_records_inside_of_aggregates_come_in_order():
    blob = aggregate(("a", b"1", None), ("b", b"2", "77"))
    event = {"Records": [item(b"plain"), item(blob, number="102"), item(b"last", number="103")]}
    records = anabranch.deaggregate(event)
    assert [(r.partition_key, r.data, r.sequence_number, r.sub_sequence_number) for r in records] == [
        ("k", b"plain", "101", -1),
        ("a", b"1", "102", 0),
        ("b", b"2", "102", 1),
        ("k", b"last", "103", -1),
    ]
    assert records[2].explicit_hash_key == "77"
    assert {(r.stream, r.shard_id) for r in records} == {("orders", "shardId-000000000006")}
    assert records[0].approximate_arrival_timestamp.year == 2018
    assert records[0].value == b"plain"


def test_values_are_decoded_as_a_consumer_would():
    event = {"Records": [item(b'{"n": 1}')]}
    assert anabranch.deaggregate(event, decode=dict)[0].value == {"n": 1}


def test_a_fan_out_consumers_arn_names_the_stream():
    event = {"Records": [item(b"x", arn=f"{ARN}/consumer/billing:1540591608")]}
    assert anabranch.deaggregate(event)[0].stream == "orders"


def test_an_empty_event_has_no_records():
    assert anabranch.deaggregate({"Records": []}) == []


@pytest.mark.parametrize("event", [{}, {"Records": [{"Sns": {}}]}, {"Records": [None]}, {"Records": 5}, None])
def test_another_event_is_refused_with_what_was_expected(event):
    with pytest.raises(CodecError, match="not a Kinesis event"):
        anabranch.deaggregate(event)


def test_data_that_is_not_base64_is_refused_by_name():
    broken = item(b"x")
    broken["kinesis"]["data"] = "%%%"
    with pytest.raises(CodecError, match="record 101 is not base64"):
        anabranch.deaggregate({"Records": [broken]})
