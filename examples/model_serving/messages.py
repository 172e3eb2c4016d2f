"""What travels through the two streams, as JSON. The partition key of both is the session, so its order is kept."""

import msgspec

LANDMARKS_STREAM = "asl-landmarks-stream"
LETTERS_STREAM = "asl-letters-stream"
FAILED_QUEUE = "asl-failed-predictions"
REVIEW_QUEUE = "asl-review"


class Landmarks(msgspec.Struct, frozen=True):
    """One hand, as a client sent it."""

    session_id: str
    connection_id: str
    number: int
    """Counts the hands of a session. Clients use it to drop repeats."""
    landmarks: list[list[float]]
    sent_at: float
    """The client's clock, which only the client compares."""
    simulate: str | None = None
    """For the demonstration: "timeout" makes the model fail, and "poison" also the processor of the dead letters. The
    ingress accepts it only while `ASL_SIMULATE` is set.
    """


class Letter(msgspec.Struct, frozen=True):
    """The prediction for one hand."""

    session_id: str
    connection_id: str
    number: int
    letter: str
    confidence: float
    processing_time_ms: float
    sent_at: float
    redriven: bool = False
    """It failed at first, and the processor of the dead letters delivered it later."""
