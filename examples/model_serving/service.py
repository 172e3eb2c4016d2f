"""The model service: reads hands by fan-out, predicts their letters, and writes them to the letters stream.

    anabranch run service:consumer --workers 2 --health-port 9000

A batch of hands is one call of the model. The batch is finished when its letters are delivered, so a crash loses
nothing: the next worker repeats what was not finished, and clients drop repeats. A hand on which the model fails goes
to the dead letters after three attempts; `anabranch dlq worker service:consumer URL` retries it later.
"""

import functools
import logging
import os
import time
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import tracing
from hands import normalized
from messages import FAILED_QUEUE, LANDMARKS_STREAM, LETTERS_STREAM, REVIEW_QUEUE, Landmarks, Letter
from model import LetterModel
from opentelemetry import trace

import anabranch
from anabranch import Alert, ConsumerSettings, DeadLetter, ProducerSettings, Retry
from anabranch.metrics import CloudWatch

tracing.configure("service")

consumer = anabranch.Consumer(
    LANDMARKS_STREAM,
    app="letter-model",
    decode=Landmarks,
    read="fanout",
    leases=os.environ.get("ANABRANCH_LEASES", "dynamodb://asl-kinesis-checkpoints"),
    on_failure=Retry(attempts=3, backoff=0.1, then=DeadLetter(f"sqs://{FAILED_QUEUE}", review=f"sqs://{REVIEW_QUEUE}")),
    alerts=[Alert(lag=5.0, for_periods=2)],
    metrics=[CloudWatch(namespace="ASL/ModelServing", interval=float(os.environ.get("ASL_METRICS_SECONDS", "60")))],
    settings=ConsumerSettings(trace=True),
)
letters = anabranch.Producer(LETTERS_STREAM, encode=Letter, linger=0.005, settings=ProducerSettings(trace="wrap"))
logger = logging.getLogger("letter-model")
logger.setLevel(logging.INFO)  # `anabranch run` shows the warnings of a program's own loggers, and these

IS_REDRIVE = "ASL_REDRIVE" in os.environ
"""Set for the processor of the dead letters. It marks its answers, and has no simulated timeouts."""


@consumer.batch_handler(max_records=256, max_wait=0.01)
async def predict(batch: anabranch.Batch[Landmarks], context: anabranch.Context) -> None:
    started = time.perf_counter()
    good, bad = check(batch.records)
    hands = [record.value for record in good]
    predictions = model().predict([hand.landmarks for hand in hands]) if hands else []
    took_ms = (time.perf_counter() - started) * 1000
    answers = [
        Letter(
            session_id=hand.session_id,
            connection_id=hand.connection_id,
            number=hand.number,
            letter=prediction.letter,
            confidence=round(prediction.confidence, 4),
            processing_time_ms=round(took_ms / len(hands), 3),
            sent_at=hand.sent_at,
            redriven=IS_REDRIVE,
        )
        for hand, prediction in zip(hands, predictions, strict=True)
    ]
    deliveries = []
    for record, answer in zip(good, answers, strict=True):
        with trace.use_span(tracing.start_span("predict", record.trace_parent), end_on_exit=True):
            deliveries.append(await letters.put(answer, answer.session_id))
    for delivery in deliveries:
        result = await delivery
        if not result.delivered:
            raise ConnectionError(f"a letter was not delivered: {result.error}")
    for answer in answers:
        context.metric("PredictionConfidence", answer.confidence)
        logger.info(
            "predicted %s",
            answer.letter,
            extra={
                "session_id": answer.session_id,
                "prediction": answer.letter,
                "confidence": answer.confidence,
                "processing_time_ms": answer.processing_time_ms,
            },
        )
    if bad is not None:
        raise anabranch.BatchFailure(failed=[bad.record]) from bad.error


class BadHand(NamedTuple):
    record: anabranch.Record[Landmarks]
    error: Exception


def check(records: Sequence[anabranch.Record[Landmarks]]) -> tuple[list[anabranch.Record[Landmarks]], BadHand | None]:
    """The hands before the first bad one, which fails alone. Those after it are delivered again."""
    good = []
    for record in records:
        try:
            check_hand(record.value)
        except (ValueError, TimeoutError) as error:
            return good, BadHand(record, error)
        good.append(record)
    return good, None


def check_hand(hand: Landmarks) -> None:
    normalized(np.array([hand.landmarks], dtype=np.float32))
    if hand.simulate == "poison":
        raise ValueError("the model cannot take this hand")
    if hand.simulate == "timeout" and not IS_REDRIVE:
        raise TimeoutError("the model did not answer in time")


@functools.cache
def model() -> LetterModel:
    return LetterModel()
