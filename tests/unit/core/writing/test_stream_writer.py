from stream_of_shards import HIGHEST, MIDDLE, Desk, listing, refused, shard, shard_id, written

from anabranch._wire.messages import PutRecordsResultEntry
from anabranch.config import ProducerSettings
from anabranch.errors import StreamNotFoundError, TransportError
from anabranch.events import ListingFailed, StreamChanged
from anabranch.limits import KIB, MIB


def answer_all(desk, start=100):
    for call in list(desk.calls):
        desk.answer(
            *(PutRecordsResultEntry(str(start + i), shard_id(0)) for i in range(len(call.entries))),
            call=desk.calls.pop(0),
        )


def test_an_idle_writer_wants_nothing():
    desk = Desk()
    steps = desk.tick()
    assert not steps.calls
    assert not steps.refresh
    assert desk.writer.tick_at_ms is None


def test_a_burst_fills_a_call_with_500_entries_and_the_rest_follows():
    desk = Desk(listing(1), order="none", aggregate=None)
    for _ in range(1_200):
        desk.put(b"x", "k")
    desk.tick()
    assert [len(call.entries) for call in desk.calls] == [500, 500]  # the shard takes 1,000 a second
    desk.tick(100)
    assert len(desk.calls[2].entries) == 100


def test_a_call_has_at_most_ten_mebibytes():
    desk = Desk(listing(12), aggregate=None)
    for number in range(24):
        desk.put(b"x" * (900 * KIB), f"key-{number}")
    desk.tick()
    assert len(desk.calls) > 1
    assert all(call.size_bytes <= 10 * MIB for call in desk.calls)


def test_a_call_has_at_most_256_kib_of_a_shard_unless_one_record_is_larger():
    desk = Desk(listing(1), aggregate=None)
    for number in range(6):
        desk.put(b"x" * (100 * KIB), f"key-{number}")
    desk.put(b"x" * (300 * KIB), "large")
    desk.tick()
    assert [len(call.entries) for call in desk.calls] == [2, 2, 2, 1]


def test_one_slow_shard_does_not_hold_back_the_others():
    desk = Desk([shard(0, 0, MIDDLE - 1), shard(1, MIDDLE, HIGHEST)])
    desk.put(b"slow", "k", "1")
    desk.tick()
    desk.answer(refused())
    desk.put(b"fast", "l", str(HIGHEST))
    desk.tick()
    assert desk.sent() == [b"fast"]
    desk.put(b"fast again", "l", str(HIGHEST))
    desk.answer(written(5, number=1))
    desk.tick()
    assert desk.sent() == [b"fast again"]
    desk.tick(60)
    assert desk.sent() == [b"slow"]


def test_requests_in_flight_are_bounded():
    desk = Desk(listing(4), aggregate=None, settings=ProducerSettings(requests_in_flight=2))
    for number in range(10):
        desk.put(b"%d" % number, f"key-{number}")
        desk.tick()
    assert len(desk.calls) == 2
    answer_all(desk)
    desk.tick()
    assert [len(call.entries) for call in desk.calls] == [8]


def test_a_flush_sends_what_lingers_and_is_over_when_all_before_it_is_settled():
    desk = Desk(listing(1), order="none", linger_ms=60_000)
    desk.put(b"1", "k")
    desk.tick()
    desk.put(b"2", "k")
    desk.tick()
    assert len(desk.calls) == 1
    epoch = desk.writer.flush(desk.now_ms)
    desk.put(b"3", "k")
    desk.tick()
    assert [len(call.entries) for call in desk.calls] == [1, 1]
    assert not desk.writer.is_flushed(epoch)
    assert desk.writer.count_pending() == 3
    answer_all(desk)
    assert desk.writer.is_flushed(epoch)
    assert not desk.writer.is_idle


def test_a_flush_covers_what_is_divided_later():
    desk = Desk(listing(1))
    desk.put(b"1", "k", "1")
    desk.put(b"2", "l", str(HIGHEST))
    epoch = desk.writer.flush(desk.now_ms)
    desk.tick()
    desk.now_ms += 10
    desk.answer(written(5, number=1))
    assert desk.writer.count_pending() == 2
    desk.tick()
    desk.now_ms += 5
    desk.list([shard(1, 0, MIDDLE - 1, starts=3), shard(2, MIDDLE, HIGHEST, starts=3)])
    assert not desk.writer.is_flushed(epoch)
    desk.tick(100)
    desk.answer(*(written(20 + i, number=1 + i) for i in range(len(desk.calls[0].entries))))
    assert desk.writer.is_flushed(epoch)


def test_records_of_two_epochs_never_share_a_bundle():
    desk = Desk()
    desk.put(b"0", "k")
    desk.tick()
    desk.put(b"1", "k")
    epoch = desk.writer.flush(desk.now_ms)
    desk.put(b"2", "k")
    desk.now_ms += 5
    desk.list(listing(1))
    desk.answer(written(5))
    desk.tick()
    assert desk.sent() == [b"1"]
    desk.answer(written(6))
    assert desk.writer.is_flushed(epoch)
    desk.tick()
    assert desk.sent() == [b"2"]


def test_abandoning_fails_everything_and_what_was_in_flight_is_perhaps_written():
    desk = Desk(listing(1))
    flying = desk.put(b"1", "k")
    desk.tick()
    waiting = desk.put(b"2", "k")
    desk.abandon()
    assert flying.put_result.maybe_written
    assert not waiting.put_result.maybe_written
    assert waiting.put_result.error == "ProducerClosed: the producer was closed before the record was delivered"
    assert desk.writer.is_idle


def test_abandoning_fails_what_waits_for_the_map_as_perhaps_written():
    desk = Desk(listing(1))
    delivery = desk.put(b"1", "k", "1")
    desk.put(b"2", "l", str(HIGHEST))
    desk.tick()
    desk.now_ms += 10
    desk.answer(written(5, number=1))
    desk.abandon()
    assert delivery.put_result.maybe_written
    assert desk.writer.is_idle


def test_a_failed_listing_is_reported_and_tried_again_while_records_flow():
    desk = Desk()
    desk.put(b"1", "k")
    desk.tick()
    desk.fail_listing(TransportError("no"))
    assert isinstance(desk.events[-1], ListingFailed)
    desk.answer(written(5))
    desk.put(b"2", "k")
    desk.tick()
    assert desk.sent() == [b"2"]
    assert desk.refreshes == 1
    assert desk.now_ms + 1_000 <= desk.writer.tick_at_ms <= desk.now_ms + 2_000
    desk.tick(2_000)
    assert desk.refreshes == 2


def test_nothing_is_refreshed_while_nothing_is_written():
    desk = Desk()
    desk.put(b"1", "k")
    desk.tick()
    desk.fail_listing(TransportError("no"))
    desk.answer(written(5))
    desk.tick(100_000)
    assert desk.refreshes == 1
    assert desk.writer.tick_at_ms is None


def test_a_stream_created_again_is_described_again():
    desk = Desk(listing(1))
    assert not desk.writer.wants_summary
    desk.put(b"1", "k")
    desk.writer._shard_map.request_refresh()
    desk.tick(5)
    desk.list([shard(0, starts=99)])
    assert desk.writer.wants_summary
    assert isinstance(desk.events[-1], StreamChanged)
    desk.tick()
    assert desk.refreshes == 2


def test_after_a_long_silence_records_go_alone_until_the_map_is_confirmed():
    desk = Desk(listing(1))
    desk.put(b"1", "k")
    desk.tick()
    desk.answer(written(5))
    desk.now_ms += 61_000
    desk.put(b"2", "k")
    desk.put(b"3", "l")
    desk.tick()
    assert sorted(desk.sent()) == [b"2", b"3"]
    assert desk.refreshes == 1


def test_a_silence_with_records_on_their_way_doubts_nothing():
    desk = Desk(listing(1), delivery_timeout_ms=1_000_000)
    desk.put(b"1", "k")
    desk.tick()
    desk.now_ms += 61_000
    desk.put(b"2", "k")
    assert desk.writer._shard_map.shards


def test_a_lane_emptied_while_it_was_listed_is_passed_over():
    desk = Desk(listing(2), delivery_timeout_ms=1_000)
    desk.put(b"1", "k")
    desk.now_ms += 1_000
    desk.put(b"2", "l")
    desk.tick()
    assert desk.sent() == [b"2"]
    assert len(desk.settled) == 1


def test_after_a_missing_stream_the_next_record_is_tried_afresh():
    desk = Desk(listing(1))
    first = desk.put(b"1", "k")
    desk.tick()
    desk.fail(StreamNotFoundError("no", operation="PutRecords", code="ResourceNotFoundException"))
    desk.writer.failures.mark_seen(first)
    desk.put(b"2", "k")
    desk.tick()
    assert desk.sent() == [b"2"]
    assert desk.refreshes == 1
