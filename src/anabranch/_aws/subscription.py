"""The events of one subscription, out of the bytes of its stream.

A stream ends in one of three ways: after a whole message (the five minutes are up, or the shard has ended), with an
exception that the service put into it, or broken. Only the first is an end; the others are raised.
"""

from collections.abc import AsyncGenerator

from anabranch._aws.errors import service_error
from anabranch._http.client.body_stream import BodyStream
from anabranch._wire.bodies import AwsError, decode_subscription_message
from anabranch._wire.event_stream import MessageDecoder
from anabranch._wire.messages import SubscribeToShardEvent
from anabranch.errors import CodecError, TransportError

__all__ = ["read_events"]


async def read_events(stream: BodyStream) -> AsyncGenerator[SubscribeToShardEvent, None]:
    decoder = MessageDecoder()
    request_id = stream.headers.get(b"x-amzn-requestid")
    while pieces := await stream.receive():
        for piece in pieces:
            try:
                messages = decoder.feed(piece)
            except CodecError as error:
                raise TransportError(f"SubscribeToShard: {error}") from error
            if messages:
                stream.progress()
            for message in messages:
                try:
                    meaning = decode_subscription_message(message)
                except CodecError as error:
                    raise TransportError(f"SubscribeToShard: {error}") from error
                if isinstance(meaning, AwsError):
                    raise service_error(
                        "SubscribeToShard",
                        meaning,
                        status=400,
                        request_id=None if request_id is None else request_id.decode("latin-1"),
                    )
                if meaning is not None:
                    yield meaning
    if decoder.buffered_bytes:
        raise TransportError("SubscribeToShard: the stream ended in the middle of a message")
