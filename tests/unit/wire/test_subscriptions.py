import pytest

from anabranch._wire.bodies import AwsError, decode_subscription_message
from anabranch._wire.event_stream import Message
from anabranch._wire.messages import KinesisRecord, SubscribeToShardEvent
from anabranch.errors import CodecError

EVENT: dict[str, str] = {":message-type": "event", ":event-type": "SubscribeToShardEvent"}


def test_an_event_carries_records() -> None:
    payload = (
        b'{"Records":[{"Data":"QQ==","PartitionKey":"k","SequenceNumber":"1"}],'
        b'"ContinuationSequenceNumber":"2","MillisBehindLatest":0}'
    )
    assert decode_subscription_message(Message(EVENT, payload)) == SubscribeToShardEvent(
        [KinesisRecord(data=b"A", partition_key="k", sequence_number="1")], "2", 0
    )


@pytest.mark.parametrize("event_type", ["initial-response", "SomethingNew"])
def test_the_first_message_and_unknown_events_carry_nothing(event_type: str) -> None:
    assert decode_subscription_message(Message(EVENT | {":event-type": event_type}, b"{}")) is None


def test_an_exception_in_the_stream_is_an_error_with_its_code() -> None:
    headers: dict[str, str] = {":message-type": "exception", ":exception-type": "ResourceInUseException"}
    message = Message(headers, b'{"message":"Another active subscription exists"}')
    assert decode_subscription_message(message) == AwsError(
        "ResourceInUseException", "Another active subscription exists"
    )


def test_an_error_without_a_payload_is_read_from_its_headers() -> None:
    headers: dict[str, str] = {":message-type": "error", ":error-code": "InternalError"}
    assert decode_subscription_message(Message(headers, b"")) == AwsError("InternalError")
    with_message = headers | {":error-message": "it broke"}
    assert decode_subscription_message(Message(with_message, b"")) == AwsError("InternalError", "it broke")


@pytest.mark.parametrize("headers", [{}, {":message-type": "other"}])
def test_a_message_of_no_known_type_is_refused(headers: dict[str, str]) -> None:
    with pytest.raises(CodecError, match="unknown type"):
        decode_subscription_message(Message(headers, b""))
