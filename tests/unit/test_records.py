"""The public values can be built by hand and say what they are."""

from datetime import UTC, datetime

import pytest

from anabranch._model.streams import Position
from anabranch.records import Attempt, Batch, Context, PutResult
from shard_records import make_record


def test_a_record_knows_its_time_and_its_place():
    record = make_record(7, sub=2)
    assert record.approximate_arrival_timestamp == datetime(1970, 1, 1, 0, 0, 7, tzinfo=UTC)
    assert record.position == Position(7, 2)
    with pytest.raises(AttributeError):
        record.data = b"other"


def test_a_batch_is_iterated_over_and_measured():
    records = [make_record(1), make_record(2)]
    batch = Batch(stream="orders", shard_id="shardId-0", records=records)
    assert list(batch) == records
    assert len(batch) == 2


def test_a_context_needs_only_the_attempt_and_the_token():
    assert Context(attempt=1, fence_token=9).deadline is None


def put_result(**changes):
    return PutResult(**({"stream": "orders", "partition_key": "a", "data": b"x"} | changes))


def test_a_write_ends_as_delivered_or_says_why_not():
    delivered = put_result(shard_id="shardId-0", sequence_number="1")
    assert delivered.delivered
    assert delivered.error is None
    failed = put_result(
        attempts=(Attempt(started_seconds=0.0, duration_seconds=1.0, code="Throttled", message="slow"),)
    )
    assert not failed.delivered
    assert failed.error == "Throttled: slow"
    assert put_result().error == "never sent"
