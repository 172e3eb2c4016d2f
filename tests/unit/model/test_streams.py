"""A stream's name, short or as an ARN."""

import pytest

from anabranch._model.streams import StreamName, parse_stream


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
