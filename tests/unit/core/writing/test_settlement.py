from typing import get_args

import pytest
from stream_of_shards import HIGHEST, MIDDLE, Desk, listing, refused, shard, shard_id, written

from anabranch._core.writing.settlement import RETRY_TABLE, Outcome, outcome_of_error
from anabranch._wire.messages import PutRecordsResultEntry
from anabranch.config import ProducerSettings
from anabranch.errors import (
    AccessDeniedError,
    CredentialsError,
    ExpiredTokenError,
    InvalidRequestError,
    ResourceInUseError,
    StreamNotFoundError,
    ThrottledError,
    TransportError,
    UnavailableError,
)
from anabranch.events import AggregateStraddled, OrderUnconfirmed, WriteFailed, WriteThrottled


def service(kind, code="Code", status=400):
    return kind("message", operation="PutRecords", code=code, status=status, request_id="r-9")


@pytest.mark.parametrize(
    "error, outcome",
    [
        (service(InvalidRequestError), "call_invalid"),
        (service(ThrottledError), "call_not_written"),
        (service(ExpiredTokenError), "call_not_written"),
        (service(ResourceInUseError), "call_not_written"),
        (service(UnavailableError, status=500), "call_maybe_written"),
        (TransportError("cut"), "call_maybe_written"),
        (TransportError("refused", maybe_sent=False), "call_not_written"),
        (service(AccessDeniedError), "call_refused"),
        (service(StreamNotFoundError), "call_refused"),
        (CredentialsError("none"), "call_refused"),
    ],
)
def test_an_error_of_a_call_has_one_outcome(error, outcome):
    assert outcome_of_error(error) == outcome


def test_every_outcome_has_a_ruling():
    assert set(RETRY_TABLE) == set(get_args(Outcome))


def two_in_one_aggregate(desk, low="1", high=str(HIGHEST)):
    """Records at both ends of the hash space."""
    return [desk.put(b"low", "k", low), desk.put(b"high", "l", high)]


def split(desk):
    desk.now_ms += 5
    desk.tick()
    desk.list([shard(1, 0, MIDDLE - 1, starts=9), shard(2, MIDDLE, HIGHEST, starts=9)])


def test_a_throttled_slot_is_sent_again_with_the_same_bytes_after_a_pause():
    desk = Desk(listing(1))
    deliveries = [desk.put(b"1", "k"), desk.put(b"2", "l")]
    desk.tick()
    frozen = desk.sent()
    desk.put(b"newer", "k")
    desk.answer(refused())
    desk.tick()
    assert not desk.calls
    assert desk.writer.tick_at_ms > desk.now_ms
    assert isinstance(desk.events[-1], WriteThrottled)
    assert "70 %" in str(desk.events[-1])
    desk.tick(60)
    assert desk.sent() == frozen
    desk.answer(written(5))
    result = deliveries[1].put_result
    assert [attempt.code for attempt in result.attempts] == ["ProvisionedThroughputExceededException", None]
    assert not result.maybe_written
    desk.tick()
    assert desk.sent() == [b"newer"]


def test_an_internal_failure_rests_the_shard_without_slowing_it():
    desk = Desk(listing(1))
    desk.put(b"1", "k")
    desk.tick()
    desk.answer(refused("InternalFailure", "Internal service failure."))
    desk.tick()
    assert not desk.calls
    assert not desk.events
    desk.tick(60)
    assert desk.sent() == [b"1"]


def test_only_the_refused_slots_of_a_call_are_sent_again():
    desk = Desk(listing(2), aggregate=None)
    for number in range(6):
        desk.put(b"%d" % number, f"key-{number}")
    desk.tick()
    assert len(desk.sent()) == 6
    first = desk.sent()[0]
    desk.answer(refused(message="no shard named"), *(written(number) for number in range(10, 15)))
    desk.tick(60)
    assert desk.sent() == [first]


def test_without_a_known_shard_a_throttled_slot_rests_the_stream():
    desk = Desk()
    desk.put(b"1", "k")
    desk.tick()
    desk.answer(refused())
    desk.tick()
    assert not desk.calls
    desk.tick(50)
    assert desk.sent() == [b"1"]


def test_an_aggregate_elsewhere_with_all_records_in_range_is_delivered_and_the_map_refreshed():
    desk = Desk(listing(1))
    deliveries = two_in_one_aggregate(desk, "1", "2")
    desk.tick()
    desk.tick(100)
    desk.answer(written(5, number=1))
    assert not deliveries[0].bundle.is_settled  # the range of shard 1 is not known yet
    desk.tick()
    assert desk.refreshes == 1
    desk.now_ms += 5
    desk.list([shard(1, 0, MIDDLE - 1, starts=3), shard(2, MIDDLE, HIGHEST, starts=3)])
    desk.tick()
    assert [delivery.put_result.shard_id for delivery in deliveries] == [shard_id(1)] * 2
    assert not desk.calls


def test_an_aggregate_elsewhere_that_straddles_is_sent_again_whole_by_the_new_shards():
    desk = Desk(listing(1))
    deliveries = two_in_one_aggregate(desk)
    desk.tick()
    desk.tick(100)
    newer = desk.put(b"newer", "k", "1")
    desk.answer(written(5, number=1))
    desk.tick()
    desk.now_ms += 5
    desk.list([shard(1, 0, MIDDLE - 1, starts=3), shard(2, MIDDLE, HIGHEST, starts=3)])
    desk.tick()
    assert sorted(desk.sent()) == [b"high", b"low"]  # the newer record of the key waits for its turn
    assert any(isinstance(event, AggregateStraddled) for event in desk.events)
    desk.answer(*(written(20 + i, number=1 + (entry.data == b"high")) for i, entry in enumerate(desk.calls[0].entries)))
    desk.tick()
    assert desk.sent() == [b"newer"]
    assert [delivery.put_result.shard_id for delivery in deliveries] == [shard_id(1), shard_id(2)]
    assert all(delivery.put_result.maybe_written for delivery in deliveries)
    assert not newer.bundle.is_settled


def test_an_aggregate_in_a_shard_that_no_listing_names_is_sent_again():
    desk = Desk(listing(1))
    two_in_one_aggregate(desk)
    desk.tick()
    desk.tick(100)
    desk.answer(written(5, number=1))
    desk.tick()
    desk.now_ms += 5
    desk.list([shard(3, starts=30)])
    desk.tick(200)
    assert len(desk.calls) == 1


def test_a_listing_that_was_requested_before_the_response_does_not_decide_where_it_landed():
    desk = Desk(listing(1))
    two_in_one_aggregate(desk)
    desk.tick()
    desk.writer._shard_map.request_refresh()
    desk.tick(100)
    assert desk.refreshes == 1
    desk.now_ms += 5
    desk.answer(written(5, number=1))
    desk.list(listing(1))  # taken before the split
    assert not desk.settled
    desk.tick()
    assert desk.refreshes == 2
    desk.now_ms += 5
    desk.list([shard(1, starts=9)])
    assert len(desk.settled) == 2


def test_an_aggregate_in_a_known_parent_that_holds_all_records_is_delivered():
    desk = Desk(listing(1))
    desk.put(b"0", "j")
    desk.tick()
    desk.writer._shard_map.request_refresh()
    split(desk)
    desk.answer(written(4))
    deliveries = two_in_one_aggregate(desk, "1", "2")
    desk.tick()
    desk.answer(written(5, number=0))
    assert deliveries[0].put_result.shard_id == shard_id(0)
    assert desk.refreshes == 1


def test_a_merge_that_lags_behind_its_listing_is_tried_again_after_a_pause():
    halves = [shard(0, 0, MIDDLE - 1), shard(1, MIDDLE, HIGHEST)]
    desk = Desk(halves)
    desk.put(b"0", "j")
    desk.tick()
    desk.answer(
        written(4, number=0) if desk.calls[0].bundles[0].predicted.shard_id == shard_id(0) else written(4, number=1)
    )
    desk.writer._shard_map.request_refresh()
    desk.put(b"1", "j")
    desk.tick(5)
    desk.list([shard(2, starts=9)])
    desk.answer(written(5, number=2))
    deliveries = two_in_one_aggregate(desk)
    desk.tick()
    desk.answer(written(6, number=0))  # still the parent, which holds only one of them
    desk.tick()
    assert not desk.calls
    desk.tick(60)
    desk.answer(written(7, number=2))
    assert [delivery.put_result.sequence_number for delivery in deliveries] == ["7", "7"]


@pytest.mark.parametrize(
    "error, maybe_written",
    [
        (service(ThrottledError), False),
        (TransportError("cut"), True),
        (TransportError("refused", maybe_sent=False), False),
        (service(UnavailableError, status=503), True),
    ],
)
def test_a_call_that_failed_for_now_is_sent_again_after_a_pause(error, maybe_written):
    desk = Desk(listing(1))
    delivery = desk.put(b"1", "k")
    desk.tick()
    desk.fail(error)
    desk.tick()
    assert not desk.calls
    assert isinstance(desk.events[-1], WriteFailed)
    desk.tick(60)
    assert desk.sent() == [b"1"]
    desk.answer(written(5))
    assert delivery.put_result.delivered
    assert delivery.put_result.maybe_written is maybe_written


def test_pauses_after_failed_calls_grow_and_are_bounded():
    desk = Desk(listing(1), delivery_timeout_ms=10_000_000)
    desk.put(b"1", "k")
    pauses = []
    for _ in range(15):
        desk.tick()
        desk.fail(TransportError("cut"))
        desk.tick()
        pauses.append(desk.writer.tick_at_ms - desk.now_ms)
        desk.now_ms = desk.writer.tick_at_ms
    assert pauses[0] <= 51
    assert max(pauses) <= 5_001
    assert min(pauses[10:]) > 2_500


@pytest.mark.parametrize("slots", [[], [written(1), written(2)]])
def test_an_answer_without_one_slot_for_each_entry_leaves_everything_open(slots):
    desk = Desk(listing(1))
    delivery = desk.put(b"1", "k")
    desk.tick()
    desk.answer(*slots)
    desk.tick(60)
    desk.answer(written(5))
    assert delivery.put_result.maybe_written
    assert delivery.put_result.attempts[0].code == "AnswerBroken"


def test_a_slot_that_says_nothing_is_sent_again():
    desk = Desk(listing(1))
    delivery = desk.put(b"1", "k")
    desk.tick()
    desk.answer(PutRecordsResultEntry())
    desk.tick(60)
    desk.answer(written(5))
    assert delivery.put_result.delivered


@pytest.mark.parametrize("error", [service(AccessDeniedError), service(StreamNotFoundError), CredentialsError("none")])
def test_an_error_that_will_not_go_away_fails_everything_at_once(error):
    desk = Desk(listing(2), aggregate="key")
    deliveries = [desk.put(b"1", "k"), desk.put(b"2", "l")]
    desk.tick()
    deliveries += [desk.put(b"3", "k"), desk.put(b"4", "m")]
    desk.fail(error)
    assert [delivery.put_result.delivered for delivery in deliveries] == [False] * 4
    assert deliveries[3].put_result.data == b"4"
    assert deliveries[0].put_result.error == f"{getattr(error, 'code', 'CredentialsError')}: " + (
        getattr(error, "message", None) or str(error)
    )
    assert desk.writer.is_idle


def test_a_missing_stream_makes_the_map_forget_it():
    desk = Desk(listing(1))
    desk.put(b"1", "k")
    desk.tick()
    desk.fail(service(StreamNotFoundError))
    assert not desk.writer._shard_map.shards


def test_a_poison_record_is_found_and_fails_alone():
    desk = Desk(listing(3), settings=ProducerSettings(after_failure="continue"))
    deliveries = [desk.put(b"poison" if number == 17 else b"fine", f"key-{number}") for number in range(40)]
    sequence_number = calls = 0
    desk.tick()
    while desk.calls:
        calls += 1
        if any(record.data == b"poison" for bundle in desk.calls[0].bundles for record in bundle.records):
            desk.fail(service(InvalidRequestError, code="ValidationException"))
        else:
            slots = []
            for bundle in desk.calls[0].bundles:
                sequence_number += 1
                slots.append(PutRecordsResultEntry(str(sequence_number), bundle.predicted.shard_id))
            desk.answer(*slots)
        desk.tick(1)
    assert [delivery.put_result.delivered for delivery in deliveries] == [number != 17 for number in range(40)]
    assert deliveries[17].put_result.attempts[-1].code == "ValidationException"
    assert calls < 25


def test_a_sequence_number_that_does_not_grow_is_reported():
    desk = Desk(listing(1))
    for number, sequence_number in enumerate((10, 9, 100, 99)):
        desk.put(b"%d" % number, "k")
        desk.tick()
        desk.answer(written(sequence_number))
    assert [event.sequence_number for event in desk.events if isinstance(event, OrderUnconfirmed)] == ["9", "99"]


def test_shard_ids_in_throttle_messages_teach_the_map():
    desk = Desk(listing(1))
    desk.put(b"1", "k")
    desk.tick()
    desk.tick(10)
    desk.answer(refused(message=f"Rate exceeded for shard {shard_id(4)} in stream orders under account 123."))
    desk.tick()
    assert desk.refreshes == 1
    assert not desk.writer._shard_map.shards


def test_records_that_waited_through_a_reshard_teach_the_map_the_next_one():
    desk = Desk(listing(1), aggregate=None)
    for number in range(4):
        desk.put(b"%d" % number, "k", "1")
    desk.tick()
    for sequence_number, number in enumerate((1, 1, 3), start=10):  # split, and later split again
        desk.tick(10)
        desk.answer(written(sequence_number, number=number))
        desk.tick(10)
        if sequence_number == 10:
            desk.list([shard(1, 0, MIDDLE - 1, starts=9), shard(2, MIDDLE, starts=9)])
    assert desk.refreshes == 2


def test_a_throttled_slot_among_written_ones_is_sent_again_at_once_and_before_anything_newer():
    desk = Desk(listing(1), aggregate=None)
    for number in range(10):
        desk.put(b"old", f"key-{number}")
    desk.tick()
    desk.put(b"newer", "key-0")
    desk.put(b"newer", "key-1")
    desk.answer(refused(), *(written(number) for number in range(10, 19)))
    desk.tick()
    assert [(entry.partition_key, entry.data) for entry in desk.calls[0].entries] == [
        ("key-0", b"old"),
        ("key-1", b"newer"),
    ]
    assert not desk.events


def test_without_a_known_shard_a_record_that_is_refused_again_and_again_rests_the_stream():
    desk = Desk()
    for number in range(10):
        desk.put(b"x", f"key-{number}")
    desk.tick()
    for attempt in range(1, 4):
        desk.answer(refused(), *(written(attempt * 10 + n) for n in range(len(desk.calls[0].entries) - 1)))
        for number in range(1, 10):
            desk.put(b"x", f"key-{number}")
        desk.tick()
        assert bool(desk.calls) is (attempt < 3)
    desk.tick(50)
    assert desk.calls


def test_calls_that_fail_together_count_once():
    desk = Desk(listing(8), aggregate=None)
    for number in range(8):
        desk.put(b"%d" % number, f"key-{number}")
        desk.tick()
    assert len(desk.calls) == 8
    for _ in range(8):
        desk.fail(TransportError("cut"))
    desk.tick()
    assert desk.writer.tick_at_ms - desk.now_ms <= 51
