"""Sequence numbers, and positions as they are written down."""

import pytest

from anabranch._model.hash_keys import HashKeyRange
from anabranch._model.streams import (
    BEFORE_FIRST_SUB,
    Position,
    Shard,
    StreamName,
    parse_sequence_number,
    parse_stream,
    shard_index,
)

AWS = "49590338271490256608559692538361571095921575989136588898"


@pytest.mark.parametrize("text", ["0", "1", AWS, "9" * 129])
def test_a_sequence_number_is_a_decimal_of_up_to_129_digits(text):
    assert parse_sequence_number(text) == int(text)


@pytest.mark.parametrize("text", ["", "00", "01", "-1", " 1", "1\n", "1_0", "\u0661", "TRIM_HORIZON", "1:0", "9" * 130])
def test_anything_else_is_refused_by_name(text):
    with pytest.raises(ValueError, match="a sequence number is a decimal integer without leading zeros"):
        parse_sequence_number(text)


def test_a_position_is_written_with_its_sub_sequence_number_where_it_has_one():
    assert str(Position(int(AWS))) == AWS
    assert str(Position(int(AWS), 0)) == f"{AWS}:0"
    assert str(Position(int(AWS), 12)) == f"{AWS}:12"


def test_a_position_without_a_sub_sequence_number_is_before_all_that_have_one():
    assert Position(5).sub_sequence_number == BEFORE_FIRST_SUB
    assert Position(4, 99) < Position(5) < Position(5, 0) < Position(5, 1) < Position(6)


@pytest.mark.parametrize("text", ["5:", "5:-1", "5:a", "5: 1", "5:1:2", "5:01", "5:\u0661", "5:" + "9" * 5000])
def test_a_position_with_no_proper_sub_sequence_number_is_refused_by_name(text):
    with pytest.raises(ValueError, match="a position is a sequence number, or one with ':'"):
        Position.parse(text)


@pytest.mark.parametrize("text", ["", ":1", "x:1", "05:1"])
def test_a_position_with_no_proper_sequence_number_is_refused_by_name(text):
    with pytest.raises(ValueError, match="a sequence number is a decimal integer"):
        Position.parse(text)


def make_shard(**changes):
    defaults = {
        "shard_id": "shardId-000000000002",
        "hash_key_range": HashKeyRange(0, 9),
        "starting_sequence_number": 1,
    }
    return Shard(**(defaults | changes))


def test_a_shard_is_open_until_it_has_an_end():
    assert make_shard().is_open
    assert not make_shard(ending_sequence_number=0).is_open


@pytest.mark.parametrize(
    "parents, expected",
    [
        ({}, ()),
        ({"parent_shard_id": "p"}, ("p",)),
        ({"parent_shard_id": "p", "adjacent_parent_shard_id": "q"}, ("p", "q")),
        ({"adjacent_parent_shard_id": "q"}, ("q",)),
    ],
    ids=["root", "split", "merge", "merge whose first parent is not named"],
)
def test_a_shard_names_its_parents(parents, expected):
    assert make_shard(**parents).parent_shard_ids == expected


def test_shards_are_values():
    assert make_shard() == make_shard()
    assert hash(make_shard()) == hash(make_shard())
    with pytest.raises(AttributeError):
        make_shard().ending_sequence_number = 1


@pytest.mark.parametrize("shard_id, expected", [("shardId-000000000042", 42), ("shardId-1234567890123", 1234567890123)])
def test_the_number_of_a_shard_is_found_in_its_id(shard_id, expected):
    assert shard_index(shard_id) == expected


@pytest.mark.parametrize("shard_id", ["", "42", "-42", "shardId-", "shardId-x", "shardId-\u0661", "shardId-0000 1"])
def test_an_id_without_a_number_is_refused_by_name(shard_id):
    with pytest.raises(ValueError, match="a shard id looks like shardId-000000000042"):
        shard_index(shard_id)


@pytest.mark.parametrize("name", ["orders", "a", "A-b_c.9", "x" * 128])
def test_a_short_name_says_nothing_of_region_and_account(name):
    assert parse_stream(name) == StreamName(name)
    assert str(parse_stream(name)) == name


@pytest.mark.parametrize(
    "partition, region", [("aws", "eu-west-1"), ("aws-cn", "cn-north-1"), ("aws-us-gov", "us-gov-west-1")]
)
def test_an_arn_says_region_and_account(partition, region):
    arn = f"arn:{partition}:kinesis:{region}:123456789012:stream/orders"
    stream = parse_stream(arn)
    assert stream == StreamName("orders", arn, region, "123456789012")
    assert str(stream) == arn


@pytest.mark.parametrize("name", ["", "with space", "orders\n", "a/b", "x" * 129, "größe"])
def test_a_name_that_the_service_would_not_take_is_refused(name):
    with pytest.raises(ValueError, match="a stream's name has 1 to 128 letters"):
        parse_stream(name)


@pytest.mark.parametrize(
    "arn",
    [
        "arn:",
        "arn:aws:sqs:eu-west-1:123456789012:orders",
        "arn:aws:kinesis:eu-west-1:12345678901:stream/orders",
        "arn:aws:kinesis:eu-west-1:" + "\u0661" * 12 + ":stream/orders",
        "arn:aws:kinesis:eu-west-1:123456789012:stream/orders/consumer/c:1",
        "arn:aws:kinesis::123456789012:stream/orders",
        "arn:aws:kinesis:eu-west-1:123456789012:stream/",
    ],
)
def test_an_arn_of_something_else_is_refused_with_one_that_is_right(arn):
    with pytest.raises(ValueError, match="arn:aws:kinesis:eu-west-1:123456789012:stream/orders, not"):
        parse_stream(arn)


def test_an_arn_with_an_impossible_name_is_refused():
    with pytest.raises(ValueError, match="a stream's name has 1 to 128 letters"):
        parse_stream("arn:aws:kinesis:eu-west-1:123456789012:stream/no good")
