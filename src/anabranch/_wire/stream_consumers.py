"""Bodies of the calls that register, describe, list and deregister a stream's fan-out consumers."""

from typing import Final

import msgspec

from anabranch._wire.bodies import AnswerDecoder, Buffer, encode_request
from anabranch._wire.messages import ConsumerDescription, ListStreamConsumersResponse

__all__ = [
    "decode_describe_stream_consumer",
    "decode_list_stream_consumers",
    "decode_register_stream_consumer",
    "encode_deregister_stream_consumer",
    "encode_describe_stream_consumer",
    "encode_list_stream_consumers",
    "encode_register_stream_consumer",
]


class _Consumer(msgspec.Struct, rename="pascal"):
    consumer_name: str
    consumer_arn: str = msgspec.field(name="ConsumerARN")
    consumer_status: str
    consumer_creation_timestamp: float
    stream_arn: str | None = msgspec.field(name="StreamARN", default=None)

    def value(self) -> ConsumerDescription:
        return ConsumerDescription(
            name=self.consumer_name,
            arn=self.consumer_arn,
            status=self.consumer_status,
            created_seconds=self.consumer_creation_timestamp,
            stream_arn=self.stream_arn,
        )


class _Registered(msgspec.Struct, rename="pascal"):
    consumer: _Consumer


class _Described(msgspec.Struct, rename="pascal"):
    consumer_description: _Consumer


class _Listed(msgspec.Struct, rename="pascal"):
    consumers: list[_Consumer] = []
    next_token: str | None = None


_REGISTERED: Final = AnswerDecoder("RegisterStreamConsumer", _Registered)
_DESCRIBED: Final = AnswerDecoder("DescribeStreamConsumer", _Described)
_LISTED: Final = AnswerDecoder("ListStreamConsumers", _Listed)


def encode_register_stream_consumer(stream_arn: str, name: str) -> list[bytes]:
    return encode_request({"StreamARN": stream_arn, "ConsumerName": name})


def decode_register_stream_consumer(body: Buffer) -> ConsumerDescription:
    return _REGISTERED.decode(body).consumer.value()


def encode_describe_stream_consumer(
    *, stream_arn: str | None = None, name: str | None = None, consumer_arn: str | None = None
) -> list[bytes]:
    """A consumer is named by its own ARN, or by its name and its stream's ARN."""
    return encode_request({"StreamARN": stream_arn, "ConsumerName": name, "ConsumerARN": consumer_arn})


def decode_describe_stream_consumer(body: Buffer) -> ConsumerDescription:
    return _DESCRIBED.decode(body).consumer_description.value()


def encode_list_stream_consumers(
    stream_arn: str, *, next_token: str | None = None, max_results: int | None = None
) -> list[bytes]:
    return encode_request({"StreamARN": stream_arn, "NextToken": next_token, "MaxResults": max_results})


def decode_list_stream_consumers(body: Buffer) -> ListStreamConsumersResponse:
    answer = _LISTED.decode(body)
    return ListStreamConsumersResponse(tuple(consumer.value() for consumer in answer.consumers), answer.next_token)


def encode_deregister_stream_consumer(consumer_arn: str) -> list[bytes]:
    """Its answer has no body."""
    return encode_request({"ConsumerARN": consumer_arn})
