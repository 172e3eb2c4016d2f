"""Every event reads as a sentence, and the set is closed."""

import logging
import pickle
import re
from typing import get_args

import msgspec
import pytest

from anabranch import events
from anabranch.events import Event
from anabranch.measures import TimeBuckets
from anabranch.reasons import Reason, StoppedByCrashes, WorkersFull

KINDS = Event.__subclasses__()
SAMPLES = {
    Reason: WorkersFull(),
    int: 3,
    float: 3.5,
    float | None: None,
    str | None: None,
    Reason | None: None,
    TimeBuckets: TimeBuckets(),
    str: "something",
    tuple[str, ...]: ("shardId-1", "shardId-2"),
}


def sample(kind, **given):
    """The event with every required field filled in by its type."""
    for field in msgspec.structs.fields(kind):
        if field.required and field.name not in given:
            given[field.name] = next((SAMPLES[t] for t in SAMPLES if t == field.type), "something")
    return kind(**given)


def test_the_set_of_events_is_closed_and_public():
    assert [kind for kind in KINDS if getattr(events, kind.__name__, None) is not kind] == []
    assert [kind for kind in KINDS if kind.__subclasses__() or kind.__name__.startswith("_")] == []


@pytest.mark.parametrize("kind", KINDS)
def test_an_event_reads_as_one_sentence_that_names_where_it_happened(kind):
    event = sample(kind, stream="orders", shard_id="shardId-7")
    assert str(event) == f"orders/shardId-7: {event.sentence()}"
    assert str(sample(kind, stream="orders")).startswith("orders: ")
    assert str(sample(kind)) == event.sentence()
    assert event.sentence().strip()
    assert "object at" not in str(event)


@pytest.mark.parametrize("kind", KINDS)
def test_an_event_is_a_value_with_a_level(kind):
    event = sample(kind)
    assert event.level in {logging.DEBUG, logging.INFO, logging.WARNING, logging.ERROR, logging.CRITICAL}
    assert event == sample(kind)
    assert pickle.loads(pickle.dumps(event)) == event
    with pytest.raises(AttributeError):
        event.stream = "another"


def test_optional_details_are_reported_when_they_are_there():
    stopped = sample(events.ConsumerStopped, leftover_count=0, failed_count=0)
    assert str(stopped) == "stopped after 3.5 s: 3 records handled, 3 committed"
    stopped = sample(events.ConsumerStopped, leftover_count=2)
    assert str(stopped).endswith("3 committed, 3 calls failed, 2 records unfinished")
    stopped = sample(events.ConsumerStopped, leftover_count=0, failed_count=1)
    assert str(stopped).endswith("3 committed, 1 call failed")
    stopped = sample(events.ConsumerStopped, leftover_count=0, failed_count=0, dead_letter_count=2, skipped_count=1)
    assert str(stopped) == "stopped after 3.5 s: 3 records finished (2 dead letters, 1 skipped), 3 committed"
    assert str(sample(events.LeaseTaken, fence_token=4)) == "lease taken (fence token 4)"
    assert str(sample(events.ShardFinished, children=())) == "finished (end); children: none"
    stop = StoppedByCrashes(owner_count=6)
    assert str(sample(events.ShardStopped, reason=stop)) == (
        "stopped: 6 owners in a row died here without any progress; its lease is kept; a worker that starts later "
        "retries"
    )
    assert str(sample(events.ShardStalled, reason=WorkersFull())) == f"stalled: {WorkersFull().text}"
    started = sample(events.ConsumerStarted, app="billing", streams=("orders",), region="eu-west-1", version="1.0")
    assert str(started) == (
        "application 'billing' started as member something: anabranch 1.0 reads orders in eu-west-1, leases in "
        "something; shardId-1, shardId-2"
    )
    ended = sample(events.ShardRecovered, reason=WorkersFull(), seconds=61.0, lag=62.5)
    assert str(ended) == f"reading again after 61 s, 62.5 s behind (it was stalled: {WorkersFull().text})"
    progress = sample(events.ConsumerProgress, lag=2.0, worst_shard="orders/1", reason=WorkersFull(), failed_count=0)
    assert str(progress) == (
        f"3 records in 4 s (3.5 records/s); 2.0 s behind; 3 shards, 3 stalled; worst: orders/1, {WorkersFull().text}"
    )
    lost = sample(events.DataLost, read_through_seconds=0.0, trimmed_through_seconds=3_600.0)
    assert "that arrived from 1970-01-01T00:00:00Z until 1970-01-01T01:00:00Z" in str(lost)
    assert sample(events.OrderChanged, repeats=True).level == logging.WARNING
    assert sample(events.OrderChanged, repeats=False).level == logging.INFO
    assert str(sample(events.HandlerFailed, retry_in_ms=None)).endswith("no further attempt")
    assert str(sample(events.HandlerFailed, retry_in_ms=20)).endswith("retrying in 20 ms")


@pytest.mark.parametrize("kind", KINDS)
def test_one_is_no_plural(kind):
    counts = {field.name: 1 for field in msgspec.structs.fields(kind) if field.name.endswith(("_count", "attempts"))}
    assert re.findall(r"\b1 (?:\w+ )?\w+s\b", sample(kind, **counts).sentence()) == []


def test_a_lost_lease_says_why_as_a_code_and_as_a_sentence():
    said = {reason: str(events.LeaseLost(reason=reason, owner="b#1")) for reason in get_args(events.LossReason)}
    assert said == {
        "taken_over": "lease lost: b#1 owns it now",
        "member_ended": "lease lost: this worker's membership ended",
        "row_changed": "lease lost: its row no longer names this worker",
    }
