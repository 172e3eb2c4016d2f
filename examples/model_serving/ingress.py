"""The ingress: what a client sends becomes a record of the landmarks stream.

The gateway calls `landmarks_from` for each WebSocket message. `lambda_handler` does the same behind API Gateway (route
`$default`). Both refuse what is not a valid hand. Otherwise many bad records in a row would look like an outage to the
service, and stop a shard for all clients.
"""

import functools
import os
from typing import Annotated, Any

import msgspec
import numpy as np
from hands import JOINTS, normalized
from messages import LANDMARKS_STREAM, Landmarks

import anabranch

BYTES_MAX = 32 * 1024

Coordinate = Annotated[float, msgspec.Meta(ge=-1e6, le=1e6)]
Point = Annotated[list[Coordinate], msgspec.Meta(min_length=3, max_length=3)]


class Message(msgspec.Struct, frozen=True):
    """One message of a client."""

    session_id: Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
    """The partition key, which may have 256 characters."""
    number: Annotated[int, msgspec.Meta(ge=0, le=2**53)]
    landmarks: Annotated[list[Point], msgspec.Meta(min_length=JOINTS, max_length=JOINTS)]
    sent_at: float = 0.0
    simulate: str | None = None


def landmarks_from(body: str | bytes, connection_id: str) -> Landmarks:
    """Raises `ValueError` if the message is too large or has another shape, or if the model cannot use the hand."""
    if len(body) > BYTES_MAX:
        raise ValueError(f"the message has {len(body)} bytes; at most {BYTES_MAX} are accepted")
    try:
        message = msgspec.json.decode(body, type=Message)
        normalized(np.array([message.landmarks], dtype=np.float32))
    except ValueError as error:  # another shape, or all points in one place
        raise ValueError(f"the message is not a hand: {error}") from error
    return Landmarks(
        session_id=message.session_id,
        connection_id=connection_id,
        number=message.number,
        landmarks=message.landmarks,
        sent_at=message.sent_at,
        simulate=message.simulate if "ASL_SIMULATE" in os.environ else None,
    )


@functools.cache
def _producer() -> anabranch.SyncProducer[Landmarks]:
    return anabranch.SyncProducer(LANDMARKS_STREAM, encode=Landmarks, linger=0)


def lambda_handler(event: dict[str, Any], _context: object) -> dict[str, Any]:
    """Answers after the record is written, so that a client knows that its hand is safe."""
    try:
        hand = landmarks_from(event.get("body") or "", event["requestContext"]["connectionId"])
    except ValueError as error:
        return {"statusCode": 400, "body": str(error)}
    _producer().put_and_wait(hand, hand.session_id)
    return {"statusCode": 200}
