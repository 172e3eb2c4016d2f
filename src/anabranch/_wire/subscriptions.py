"""What the messages of a SubscribeToShard stream mean.

The first says that the subscription stands, the others carry events, and an exception ends the stream with a code as a
failed call would. Kinds of events that are not known are passed over, as the protocol asks, so that the service may add
some.
"""

from anabranch._wire.event_stream import HeaderValue, Message
from anabranch._wire.messages import SubscribeToShardEvent
from anabranch._wire.reads import decode_subscribe_to_shard_event
from anabranch._wire.service_errors import AwsError, decode_aws_error
from anabranch.errors import CodecError

__all__ = ["decode_subscription_message"]


def decode_subscription_message(message: Message) -> SubscribeToShardEvent | AwsError | None:
    """An event, an error that ends the stream, or None for a message that carries neither."""
    headers = message.headers
    kind = headers.get(":message-type")
    if kind == "event":
        if headers.get(":event-type") != "SubscribeToShardEvent":
            return None
        return decode_subscribe_to_shard_event(message.payload)
    if kind == "exception":
        return decode_aws_error(message.payload, _text(headers.get(":exception-type")))
    if kind == "error":
        return AwsError(_text(headers.get(":error-code")), _text(headers.get(":error-message")) or "")
    raise CodecError(f"SubscribeToShard sent a message of the unknown type {kind!r}")


def _text(value: HeaderValue | None) -> str | None:
    return value if isinstance(value, str) else None
