import pytest
from stream_of_shards import HIGHEST, MIDDLE, Desk, listing, refused, shard, shard_id, written

from anabranch._core.writing.lanes import REMEMBERED_KEYS_MAX
from anabranch._wire.messages import PutRecordsResultEntry
from anabranch.config import ProducerSettings
from anabranch.errors import AccessDeniedError, InvalidRequestError, TransportError

HALVES = [shard(1, 0, MIDDLE - 1, starts=9), shard(2, MIDDLE, HIGHEST, starts=9)]
INVALID = InvalidRequestError("bad", operation="PutRecords", code="ValidationException")
DENIED = AccessDeniedError("no", operation="PutRecords", code="AccessDeniedException")


def relist(desk, shards):
    desk.writer._shard_map.request_refresh()
    desk.now_ms += 5
    desk.tick()
    desk.now_ms += 5
    desk.list(shards)


def test_one_record_of_a_lane_in_flight_and_the_next_one_fills_meanwhile():
    desk = Desk(listing(1))
    desk.put(b"1", "k")
    desk.tick()
    desk.put(b"2", "k")
    desk.put(b"3", "l")
    desk.tick(1_000)
    assert len(desk.calls) == 1
    desk.answer(written(5))
    desk.tick()
    assert len(desk.calls[0].bundles[0].records) == 2


def test_a_call_has_one_entry_of_a_lane():
    desk = Desk(listing(1))
    for _ in range(3):
        desk.put(b"x" * 40_000, "k")
    desk.tick()
    assert [len(call.entries) for call in desk.calls] == [1]


def test_without_order_everything_that_is_full_goes_at_once_and_the_rest_lingers():
    desk = Desk(listing(1), order="none", linger_ms=100)
    for _ in range(4):
        desk.put(b"x" * 40_000, "k")
    desk.tick()
    assert [[len(bundle.records) for bundle in call.bundles] for call in desk.calls] == [[1, 3]]
    desk.put(b"x", "k")
    desk.tick()
    assert len(desk.calls) == 1
    assert desk.writer.tick_at_ms == desk.now_ms + 100
    desk.tick(99)
    assert len(desk.calls) == 1
    desk.tick(1)
    assert len(desk.calls) == 2


def test_a_lingering_bundle_that_went_by_size_is_not_waited_for():
    desk = Desk(listing(1), order="none", linger_ms=100)
    desk.put(b"x", "k")
    desk.tick()
    desk.put(b"x" * 40_000, "k")
    desk.put(b"x" * 40_000, "k")
    desk.tick()
    assert len(desk.calls) == 2
    desk.tick(100)
    assert len(desk.calls) == 3


def test_without_order_a_backlog_makes_larger_aggregates():
    desk = Desk(listing(1), order="none", settings=ProducerSettings(requests_in_flight=1))
    desk.put(b"x", "k")
    desk.tick()
    for _ in range(15):
        desk.put(b"x" * 20_000, "k")
    desk.answer(written(5))
    desk.tick()
    assert [len(bundle.records) for bundle in desk.calls[0].bundles] == [2]  # a call takes at most 256 KiB per shard
    desk.answer(written(6))
    desk.tick()
    assert [len(bundle.records) for bundle in desk.calls[0].bundles] == [13]


def test_without_order_and_aggregation_records_of_a_shard_go_side_by_side():
    desk = Desk(listing(1), order="none", aggregate=None)
    for number in range(3):
        desk.put(b"%d" % number, "k")
    desk.tick()
    assert desk.sent() == [b"0", b"1", b"2"]


def test_without_aggregation_a_key_has_one_record_in_flight():
    desk = Desk(listing(1), aggregate=None)
    for number in range(3):
        desk.put(b"%d" % number, "k")
        desk.put(b"%d" % number, "l")
    desk.tick()
    assert desk.sent() == [b"0", b"0"]
    desk.answer(written(5), written(6))
    desk.tick()
    assert desk.sent() == [b"1", b"1"]


def test_a_child_sends_nothing_before_its_parents_records_in_flight_are_resolved():
    desk = Desk(listing(1))
    desk.put(b"1", "k", "1")
    desk.tick()
    desk.put(b"2", "k", "1")
    relist(desk, HALVES)
    desk.put(b"3", "k", "1")
    desk.put(b"4", "m", str(HIGHEST))
    desk.tick()
    assert len(desk.calls) == 1
    desk.answer(written(5))
    desk.tick()
    (call,) = desk.calls
    assert [[record.data for record in bundle.records] for bundle in call.bundles] == [[b"2", b"3"], [b"4"]]
    assert [bundle.predicted.shard_id for bundle in call.bundles] == [shard_id(1), shard_id(2)]


def test_what_failed_in_the_parent_goes_first_in_the_child():
    desk = Desk(listing(1))
    desk.put(b"1", "k", "1")
    desk.put(b"2", "l", "2")
    desk.tick()
    desk.put(b"3", "k", "1")
    relist(desk, HALVES)
    desk.fail(TransportError("cut"))
    sent = []
    for _ in range(3):
        desk.tick(100)
        if desk.calls:
            sent.append([record.data for bundle in desk.calls[0].bundles for record in bundle.records])
            desk.answer(
                *(PutRecordsResultEntry(str(50 + len(sent)), b.predicted.shard_id) for b in desk.calls[0].bundles)
            )
    assert sent == [[b"1", b"2"], [b"3"]]
    assert desk.settled[0].put_result.maybe_written
    assert not desk.settled[2].put_result.maybe_written


def test_the_child_of_a_merge_waits_for_both_parents():
    desk = Desk([shard(1, 0, MIDDLE - 1), shard(2, MIDDLE, HIGHEST)], settings=ProducerSettings(requests_in_flight=2))
    desk.put(b"low", "k", "1")
    desk.tick()
    desk.put(b"high", "l", str(HIGHEST))
    desk.tick()
    relist(desk, [shard(3, starts=9)])
    desk.put(b"newer", "k", "1")
    desk.tick()
    desk.answer(written(5, number=1))
    desk.tick()
    assert len(desk.calls) == 1
    desk.answer(written(6, number=2))
    desk.tick()
    assert desk.sent() == [b"newer"]


def test_keys_that_went_alone_before_the_map_was_known_wait_for_themselves():
    desk = Desk()
    desk.put(b"1", "k")
    desk.put(b"a", "l")
    desk.tick()
    desk.put(b"2", "k")
    desk.put(b"3", "k")
    desk.now_ms += 5
    desk.list(listing(1))
    desk.tick()
    assert len(desk.calls) == 1
    desk.answer(written(5), refused())
    desk.tick(100)
    assert [[record.data for record in bundle.records] for bundle in desk.calls[0].bundles] == [[b"a"]]
    desk.answer(written(6))
    desk.tick()
    assert [[record.data for record in bundle.records] for bundle in desk.calls[0].bundles] == [[b"2", b"3"]]


def test_what_was_tried_before_the_map_was_known_keeps_its_history():
    desk = Desk()
    first = desk.put(b"1", "k")
    desk.tick()
    desk.put(b"2", "k")
    desk.fail(TransportError("cut"))
    desk.list(listing(1))
    desk.tick(100)
    assert desk.sent() == [b"1"]
    desk.answer(written(5))
    assert [attempt.code for attempt in first.put_result.attempts] == ["TransportError", None]
    desk.tick()
    assert desk.sent() == [b"2"]


def test_a_disproved_shard_sends_its_keys_alone_until_the_listing_is_there():
    desk = Desk(listing(1))
    desk.put(b"1", "k", "1")
    desk.tick()
    desk.now_ms += 10
    desk.put(b"2", "k", "1")
    desk.put(b"3", "l", "2")
    desk.answer(written(5, number=1))  # a record alone: delivered, and the map was wrong
    desk.tick()
    assert sorted(desk.sent()) == [b"2", b"3"]
    assert desk.refreshes == 1
    desk.put(b"4", "k", "1")
    desk.now_ms += 10
    desk.list(HALVES)
    desk.tick()
    assert len(desk.calls) == 1
    desk.answer(written(6, number=1), written(7, number=1))
    desk.tick()
    assert desk.sent() == [b"4"]


def test_a_key_that_goes_alone_again_waits_for_its_record_in_flight():
    desk = Desk()
    desk.put(b"1", "k")
    desk.tick()
    desk.now_ms += 5
    desk.list(listing(1))
    desk.writer._shard_map.clear()
    desk.put(b"2", "k")
    desk.tick()
    assert len(desk.calls) == 1
    desk.answer(written(5))
    desk.tick()
    assert desk.sent() == [b"2"]


def test_lanes_of_keys_follow_the_map_without_draining():
    desk = Desk(listing(1), aggregate="key")
    desk.put(b"1", "k", "1")
    desk.tick()
    desk.put(b"2", "k", "1")
    relist(desk, HALVES)
    desk.answer(written(5))
    desk.tick()
    assert desk.calls[0].lanes[0].queue.shard.shard_id == shard_id(1)


def test_later_records_of_a_failed_key_fail_too_until_the_failure_is_seen():
    desk = Desk(listing(1), aggregate=None)
    failed = desk.put(b"1", "k")
    other = desk.put(b"a", "l")
    desk.tick()
    waiting = desk.put(b"2", "k")
    desk.answer(refused("InternalFailure", "no"), written(5))
    desk.tick(100)
    desk.fail(INVALID)
    assert other.put_result.delivered
    assert failed.put_result.error == "ValidationException: bad"
    assert waiting.put_result.error.startswith("OrderKept: an earlier record of this key")
    third = desk.put(b"3", "k")
    assert third.bundle.is_settled
    assert third.put_result.error.startswith("OrderKept")
    assert not desk.put(b"b", "l").bundle.is_settled
    desk.writer.failures.mark_seen(failed)
    assert not desk.put(b"4", "k").bundle.is_settled


def test_with_continue_later_records_of_a_failed_key_continue():
    desk = Desk(listing(1), aggregate=None, settings=ProducerSettings(after_failure="continue"))
    failed = desk.put(b"1", "k")
    desk.tick()
    later = desk.put(b"2", "k")
    desk.fail(INVALID)
    assert failed.bundle.is_settled
    assert not later.bundle.is_settled
    desk.tick()
    assert desk.sent() == [b"2"]


def test_only_the_later_records_of_the_failed_key_fail_in_a_shared_lane():
    desk = Desk(listing(1))
    desk.put(b"1", "k")
    desk.tick()
    later = [desk.put(b"2", "k"), desk.put(b"a", "l"), desk.put(b"3", "k"), desk.put(b"b", "l")]
    desk.fail(INVALID)
    assert [delivery.bundle.is_settled for delivery in later] == [True, False, True, False]
    assert desk.put(b"4", "k").bundle.is_settled
    assert desk.put(b"5", "k", "7").bundle.is_settled
    desk.tick()
    assert [record.data for record in desk.calls[0].bundles[0].records] == [b"a", b"b"]


def test_each_failure_is_seen_once():
    desk = Desk(listing(1))
    first, second = desk.put(b"1", "k"), desk.put(b"2", "l")
    desk.tick()
    desk.fail(DENIED)
    failures = desk.writer.failures
    assert failures.mark_seen(first)
    assert not failures.mark_seen(first)
    assert failures.take_all() == [second]
    assert not failures.take_all()
    assert second.put_result.data == b"2"


def test_records_that_wait_too_long_fail_and_younger_ones_stay():
    desk = Desk(listing(1), delivery_timeout_ms=1_000)
    desk.put(b"0", "j")
    desk.tick()
    old = desk.put(b"1", "k")
    desk.now_ms += 500
    young, follower = desk.put(b"a", "l"), desk.put(b"2", "k")
    desk.tick()
    desk.tick(500)
    assert old.put_result.error == "DeliveryTimeout: not delivered within 1 s"
    assert not old.put_result.maybe_written
    assert follower.put_result.error.startswith("OrderKept")
    assert not young.bundle.is_settled
    desk.answer(written(5))
    desk.tick()
    assert desk.sent() == [b"a"]
    assert desk.writer.tick_at_ms == 2_500  # when the young one would be late


def test_what_was_perhaps_written_and_then_timed_out_is_marked():
    desk = Desk(listing(1), delivery_timeout_ms=1_000)
    delivery = desk.put(b"1", "k")
    desk.tick()
    desk.tick(900)
    desk.fail(TransportError("cut"))
    desk.now_ms += 100
    desk.writer._paused_until_ms = desk.now_ms + 1
    desk.tick()
    assert delivery.put_result.maybe_written
    assert [attempt.code for attempt in delivery.put_result.attempts] == ["TransportError", "DeliveryTimeout"]
    assert desk.writer.is_idle
    assert desk.writer.tick_at_ms is None


def test_what_waits_for_a_listing_that_fails_is_sent_again_record_by_record():
    desk = Desk(listing(1))
    deliveries = [desk.put(b"1", "k", "1"), desk.put(b"2", "l", str(HIGHEST))]
    desk.tick()
    desk.tick(50)
    desk.answer(written(5, number=9))
    assert desk.tick().refresh
    desk.fail_listing(TransportError("no"))
    desk.tick(60)
    assert desk.sent() == [b"1", b"2"]
    desk.answer(written(6, number=9), written(7, number=10))
    assert [delivery.put_result.sequence_number for delivery in deliveries] == ["6", "7"]
    assert deliveries[0].put_result.maybe_written


def test_what_waits_for_a_listing_that_does_not_answer_times_out_as_perhaps_written():
    desk = Desk(listing(1), delivery_timeout_ms=5_000)
    deliveries = [desk.put(b"1", "k", "1"), desk.put(b"2", "l", str(HIGHEST))]
    desk.tick()
    desk.tick(50)
    desk.answer(written(5, number=9))
    assert desk.tick().refresh
    desk.tick(3_000)
    assert not desk.settled
    desk.tick(2_000)
    assert [delivery.put_result.maybe_written for delivery in deliveries] == [True, True]
    assert deliveries[0].put_result.attempts[-1].code == "DeliveryTimeout"
    assert desk.writer.is_idle


def test_the_memory_of_keys_is_bounded(monkeypatch):
    monkeypatch.setattr("anabranch._core.writing.lanes.REMEMBERED_KEYS_MAX", 10)
    desk = Desk(listing(1))
    for number in range(25):
        desk.put(b"x", f"key-{number}")
    assert len(desk.writer._lane_of_key) <= 10
    assert REMEMBERED_KEYS_MAX == 1 << 16


@pytest.mark.parametrize("order", ["key", "none"])
def test_a_service_that_places_records_itself_gets_each_one_alone(order):
    from stream_of_shards import summary

    desk = Desk(order=order)
    for number in range(3):
        desk.put(b"%d" % number, "k")
    desk.tick()
    desk.now_ms += 5
    desk.list(listing(2), summary(record_distribution="AUTO"))
    desk.put(b"3", "k")
    desk.tick()
    assert not desk.writer.writes(desk.now_ms).aggregates
    assert [entry.data for call in desk.calls for entry in call.entries] == [b"0", b"1", b"2", b"3"]
    assert "AUTO" in str(desk.events[-1])
    for call in list(desk.calls):
        desk.answer(*(written(9, number=i % 2) for i in range(len(call.entries))))
    assert len(desk.settled) == 4
    assert desk.writer.is_idle


def test_a_key_is_not_aggregated_before_the_distribution_mode_is_known():
    """Consumers skip an aggregate in a wrong shard: on an AUTO stream it would be lost, but reported as delivered."""
    desk = Desk(aggregate="key")
    for number in range(3):
        desk.put(b"%d" % number, "k")
    desk.tick()
    assert [entry.data for call in desk.calls for entry in call.entries] == [b"0"]
    desk.now_ms += 5
    desk.list(listing(2))
    desk.put(b"3", "k")
    desk.put(b"4", "k")
    later = []
    for number in range(3):
        desk.answer(written(9 + number))
        desk.tick(5)
        later += [entry.data for call in desk.calls for entry in call.entries]
    assert later[:2] == [b"1", b"2"]
    assert len(later) == 3, "once the stream is listed, a key's records travel together"


def test_a_service_that_places_records_itself_is_reported_once_and_stays_so():
    from stream_of_shards import summary

    desk = Desk(order="key")
    desk.put(b"1", "k")
    desk.tick()
    desk.now_ms += 5
    desk.list(listing(2), summary(record_distribution="AUTO"))
    desk.writer._shard_map.request_refresh()
    desk.tick(5)
    desk.list(listing(2), summary(record_distribution="AUTO"))
    assert len(desk.events) == 1
    desk.fail(DENIED)
    assert desk.settled


def test_a_shard_that_stays_keeps_its_lane_through_a_reshard_of_another():
    desk = Desk([shard(1, 0, MIDDLE - 1), shard(2, MIDDLE, HIGHEST)])
    desk.put(b"1", "k", "1")
    desk.tick()
    desk.put(b"2", "k", "1")
    relist(desk, [shard(1, 0, MIDDLE - 1), shard(3, MIDDLE, MIDDLE + 9, 8), shard(4, MIDDLE + 10, HIGHEST, 8)])
    desk.put(b"3", "k", "1")
    desk.answer(written(5, number=1))
    desk.tick()
    assert [record.data for record in desk.calls[0].bundles[0].records] == [b"2", b"3"]


def test_by_key_without_order_a_keys_aggregates_go_side_by_side():
    desk = Desk(listing(1), order="none", aggregate="key", linger_ms=10)
    for number in range(3):
        desk.put(b"%d" % number, "k")
        desk.tick()
        desk.tick(10)
    assert [call.entries[0].data for call in desk.calls] == [b"0", b"1", b"2"]


def test_refusals_of_one_shard_in_one_call_are_reported_once():
    desk = Desk(listing(1), aggregate=None)
    desk.put(b"1", "k")
    desk.put(b"2", "l")
    desk.tick()
    desk.answer(refused(), refused())
    assert len(desk.events) == 1


def test_bundles_without_a_record_of_the_failed_key_stay_as_they_are():
    desk = Desk(listing(1))
    desk.put(b"1", "k")
    desk.tick()
    kept = desk.put(b"x" * 270_000, "l")
    doomed = desk.put(b"2", "k")
    bundle = kept.bundle
    desk.fail(INVALID)
    assert doomed.bundle.is_settled
    assert kept.bundle is bundle
