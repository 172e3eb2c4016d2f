import json
import os

import pybase64
import pytest

from anabranch._model.streams import StreamName
from anabranch._wire.bodies import PIECE_BYTES_MAX, decode_put_records, encode_put_records
from anabranch._wire.messages import PutRecordsEntry, PutRecordsResponse, PutRecordsResultEntry
from anabranch.errors import CodecError

ORDERS = StreamName("orders")


def test_a_record_is_written_with_the_members_that_it_has() -> None:
    assert encode_put_records(ORDERS, [PutRecordsEntry(b"A", "k")]) == [
        b'{"StreamName":"orders","Records":[{"Data":"QQ==","PartitionKey":"k"}]}'
    ]
    assert encode_put_records(StreamName("orders", "arn:x"), [PutRecordsEntry(b"", 'k"\n', "7")]) == [
        b'{"StreamARN":"arn:x","Records":[{"Data":"","PartitionKey":"k\\"\\n","ExplicitHashKey":"7"}]}'
    ]


def test_many_small_records_are_one_piece() -> None:
    entries = [PutRecordsEntry(b"A", "k"), PutRecordsEntry(b"B", "k", "7"), PutRecordsEntry(b"", "\u00e9")]
    assert b"".join(encode_put_records(ORDERS, entries)).decode() == (
        '{"StreamName":"orders","Records":[{"Data":"QQ==","PartitionKey":"k"},'
        '{"Data":"Qg==","PartitionKey":"k","ExplicitHashKey":"7"},{"Data":"","PartitionKey":"\u00e9"}]}'
    )
    assert json.loads(encode_put_records(ORDERS, [])[0]) == {"StreamName": "orders", "Records": []}


@pytest.mark.parametrize("sizes", [[1000] * 500, [1 << 20] * 9, [100, 1 << 20, 100, 40_000, 49_152, 24_576, 24_577, 0]])
def test_large_requests_are_cut_into_bounded_pieces(sizes: list[int]) -> None:
    entries = [PutRecordsEntry(os.urandom(size), f"key-{index}") for index, size in enumerate(sizes)]
    pieces = encode_put_records(ORDERS, entries)
    assert len(pieces) > 1
    assert all(0 < len(piece) <= PIECE_BYTES_MAX for piece in pieces)
    records = json.loads(b"".join(pieces))["Records"]
    assert [pybase64.b64decode(record["Data"], validate=True) for record in records] == [e.data for e in entries]
    assert [record["PartitionKey"] for record in records] == [entry.partition_key for entry in entries]


def test_a_single_large_record_is_cut_too() -> None:
    entry = PutRecordsEntry(os.urandom(10 << 20), "k", "7")
    pieces = encode_put_records(ORDERS, [entry])
    assert max(map(len, pieces)) <= PIECE_BYTES_MAX
    (record,) = json.loads(b"".join(pieces))["Records"]
    assert pybase64.b64decode(record.pop("Data")) == entry.data
    assert record == {"PartitionKey": "k", "ExplicitHashKey": "7"}


@pytest.mark.parametrize("entry", [PutRecordsEntry(b"", "\ud800"), PutRecordsEntry(b"", "k", "\ud800")])
def test_a_key_that_is_not_unicode_is_refused(entry: PutRecordsEntry) -> None:
    with pytest.raises(CodecError, match="not valid Unicode"):
        encode_put_records(ORDERS, [entry])


def test_the_answer_to_many_has_a_slot_for_each() -> None:
    body = (
        b'{"FailedRecordCount":1,"Records":[{"SequenceNumber":"5","ShardId":"shardId-0"},'
        b'{"ErrorCode":"InternalFailure","ErrorMessage":"Internal Service Failure."}]}'
    )
    expected = PutRecordsResponse(
        [
            PutRecordsResultEntry("5", "shardId-0"),
            PutRecordsResultEntry(None, None, "InternalFailure", "Internal Service Failure."),
        ],
        "r",
    )
    assert decode_put_records(body, request_id="r") == expected


class Key(str):
    __slots__ = ()


def test_keys_may_be_of_a_subclass_of_str():
    encoded = encode_put_records(ORDERS, [PutRecordsEntry(b"A", Key("k"), Key("7"))])
    assert encoded == encode_put_records(ORDERS, [PutRecordsEntry(b"A", "k", "7")])
