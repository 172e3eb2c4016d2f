"""The ingress: what a client sends becomes a record of the landmarks stream.

The gateway calls `landmarks_from` for each WebSocket message. `lambda_handler` does the same behind API Gateway (route
`$default`). Both refuse messages of another shape, so that only hands reach the stream.
"""

import functools
from typing import Any

import msgspec
from messages import LANDMARKS_STREAM, Landmarks

import anabranch

BYTES_MAX = 32 * 1024


class Message(msgspec.Struct, frozen=True):
    """One message of a client."""

    session_id: str
    number: int
    landmarks: list[list[float]]
    sent_at: float = 0.0
    simulate: str | None = None


def landmarks_from(body: str | bytes, connection_id: str) -> Landmarks:
    """Raises `ValueError` if the message is too large or has another shape."""
    if len(body) > BYTES_MAX:
        raise ValueError(f"the message has {len(body)} bytes; at most {BYTES_MAX} are accepted")
    try:
        message = msgspec.json.decode(body, type=Message)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"the message is not a hand: {error}") from error
    if not message.session_id:
        raise ValueError("session_id is empty; it names the session whose order is kept")
    return Landmarks(
        session_id=message.session_id,
        connection_id=connection_id,
        number=message.number,
        landmarks=message.landmarks,
        sent_at=message.sent_at,
        simulate=message.simulate,
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
