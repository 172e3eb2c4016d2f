import pytest
from stream_of_shards import MIDDLE, Desk, listing, shard, shard_id, written

from anabranch._core.writing.bundles import AGGREGATE_BYTES, AGGREGATE_BYTES_BUSY, OutgoingRecord, cost_of
from anabranch._wire.aggregate import MAGIC, PRODUCER_TAG, TRACE_TAG, Tag, open_aggregate
from anabranch._wire.messages import PutRecordsResultEntry
from anabranch.config import ProducerSettings
from anabranch.limits import MIB


def opened(entry):
    aggregate = open_aggregate(entry.data)
    return [(key, data) for key, _, data in aggregate.sub_records()]


def test_records_of_a_shard_share_one_aggregate_marked_as_ours():
    desk = Desk(listing(1))
    deliveries = [desk.put(b"%d" % number, f"key-{number}") for number in range(5)]
    desk.tick()
    (entry,) = desk.calls[0].entries
    assert opened(entry) == [(f"key-{number}", b"%d" % number) for number in range(5)]
    assert open_aggregate(entry.data).first_tags == (PRODUCER_TAG,)
    assert entry.partition_key == "key-0"
    assert entry.explicit_hash_key is None
    desk.answer(written(77))
    results = [delivery.put_result for delivery in deliveries]
    assert [(r.sequence_number, r.sub_sequence_number, r.shard_id) for r in results] == [
        ("77", number, shard_id(0)) for number in range(5)
    ]
    assert results[0].attempts[0].request_id == "request-1"
    assert results[0].attempts[0].started_seconds == 6.0


def test_a_record_alone_goes_as_it_is():
    desk = Desk(listing(1))
    delivery = desk.put(b"only", "k", "12345")
    desk.tick()
    (entry,) = desk.calls[0].entries
    assert (entry.data, entry.partition_key, entry.explicit_hash_key) == (b"only", "k", "12345")
    desk.answer(written(77))
    assert delivery.put_result.sub_sequence_number == -1
    assert delivery.put_result.explicit_hash_key == "12345"


def test_a_record_that_is_itself_an_aggregate_is_wrapped():
    desk = Desk(listing(1))
    desk.put(MAGIC + b"whatever", "k")
    desk.tick()
    assert opened(desk.calls[0].entries[0]) == [("k", MAGIC + b"whatever")]
    desk.answer(written(77))
    assert desk.settled[0].put_result.sub_sequence_number == 0


def test_without_aggregation_every_record_goes_exactly_as_it_was_given():
    desk = Desk(listing(1), aggregate=None)
    desk.put(MAGIC + b"whatever", "k")
    desk.put(b"two", "l")
    desk.tick()
    assert desk.sent() == [MAGIC + b"whatever", b"two"]


def test_without_a_map_each_record_goes_alone_and_is_wrapped_where_it_has_to_be():
    desk = Desk()
    desk.put(MAGIC + b"whatever", "k")
    desk.put(b"two", "l")
    desk.tick()
    assert opened(desk.calls[0].entries[0]) == [("k", MAGIC + b"whatever")]
    assert desk.calls[0].entries[1].data == b"two"
    assert desk.refreshes == 1


@pytest.mark.parametrize("explicit_hash_key", [None, "99"])
def test_the_outer_key_is_what_the_user_says_and_the_hash_key_is_the_first_records(explicit_hash_key):
    desk = Desk(listing(1), settings=ProducerSettings(aggregate_partition_key="a"))
    first = desk.put(b"1", "key-1", explicit_hash_key)
    desk.put(b"2", "key-2", explicit_hash_key)
    desk.tick()
    (entry,) = desk.calls[0].entries
    assert entry.partition_key == "a"
    assert int(entry.explicit_hash_key) == int.from_bytes(first.digest)


def test_explicit_hash_keys_travel_inside():
    desk = Desk(listing(1))
    desk.put(b"1", "k", "5")
    desk.put(b"2", "k", None)
    desk.put(b"3", "k", "6")
    desk.tick()
    (entry,) = desk.calls[0].entries
    assert [hash_key for _, hash_key, _ in open_aggregate(entry.data).sub_records()] == ["5", None, "6"]
    assert entry.explicit_hash_key == "5"


def test_an_idle_lane_sends_50_kib_and_a_loaded_one_256():
    desk = Desk(listing(1))
    for number in range(2_000):
        desk.put(b"x" * 1_000, f"k{number % 7}")
    desk.tick()
    sizes = []
    while desk.calls:
        sizes.append(len(desk.calls[0].entries[0].data) + len(desk.calls[0].entries[0].partition_key))
        assert len(desk.calls[0].entries) == 1
        desk.answer(written(100 + len(sizes)))
        desk.tick(20_000)
    assert AGGREGATE_BYTES - 1_100 < sizes[0] <= AGGREGATE_BYTES
    assert all(AGGREGATE_BYTES_BUSY - 1_100 < size <= AGGREGATE_BYTES_BUSY for size in sizes[1:-1])
    assert len(desk.settled) == 2_000


def test_a_record_larger_than_any_aggregate_goes_alone_in_its_place():
    desk = Desk(listing(1))
    desk.put(b"before", "k")
    desk.put(b"x" * 300_000, "k")
    desk.put(b"after", "k")
    sent = []
    desk.tick()
    while desk.calls:
        sent.append(desk.calls[0].entries[0].data[:6])
        desk.answer(written(100 + len(sent)))
        desk.tick(20_000)
    assert sent == [b"before", b"xxxxxx", b"after"]


def test_a_legal_record_of_the_largest_size_is_taken_and_one_byte_more_is_not():
    desk = Desk(listing(1))
    assert desk.put(b"x" * (10 * MIB - 1), "k")
    with pytest.raises(ValueError, match=r"has 10485761 bytes .* at most 10485760"):
        desk.put(b"x" * (10 * MIB), "k")
    desk.writer._shard_map.request_refresh()
    desk.tick()
    desk.list(listing(1), None)
    assert desk.put(b"x" * (10 * MIB - 1), "k")


def test_the_streams_own_record_size_is_kept_once_it_is_known():
    from stream_of_shards import summary

    desk = Desk()
    desk.put(b"x", "k")
    desk.tick()
    desk.list(listing(1), summary(record_kib_max=1024))
    with pytest.raises(ValueError, match="1048576"):
        desk.put(b"x" * MIB, "k")
    with pytest.raises(ValueError, match="1048576"):
        desk.put(MAGIC + b"x" * (MIB - 100), "k")  # wrapping it would be too much
    assert desk.put(b"x" * (MIB - 1), "k")


@pytest.mark.parametrize(
    "key, hash_key",
    [("", None), ("k" * 257, None), ("\ud800", None), ("k", "007"), ("k", str(1 << 128)), ("k", "-1")],
)
def test_keys_that_the_service_would_not_accept_are_refused_at_once(key, hash_key):
    desk = Desk(listing(1))
    with pytest.raises(ValueError, match="key"):
        desk.put(b"x", key, hash_key)
    assert desk.writer.is_idle


def test_by_key_each_key_has_its_own_aggregate():
    desk = Desk(listing(2), aggregate="key")
    for number in range(6):
        desk.put(b"%d" % number, f"key-{number % 2}")
    desk.tick()
    (call,) = desk.calls
    assert [opened(entry) for entry in call.entries] == [
        [("key-0", b"0"), ("key-0", b"2"), ("key-0", b"4")],
        [("key-1", b"1"), ("key-1", b"3"), ("key-1", b"5")],
    ]


def test_an_aggregate_of_one_key_is_right_wherever_it_lands():
    desk = Desk([shard(1, 0, MIDDLE - 1), shard(2, MIDDLE)], aggregate="key")
    deliveries = [desk.put(b"1", "k"), desk.put(b"2", "k")]
    desk.tick()
    desk.answer(written(9, number=33))
    assert [delivery.put_result.shard_id for delivery in deliveries] == [shard_id(33)] * 2


PARENT = "00-" + "ab" * 16 + "-" + "cd" * 8 + "-01"


class TaggedRecord(OutgoingRecord, gc=False, eq=False):
    @property
    def tags(self):
        return (Tag(TRACE_TAG, PARENT),)


def put_tagged(desk, data, key):
    record = TaggedRecord(None, 0, key, None, data, desk.now_ms)
    return desk.writer.put_record(record, cost_of(data, key), desk.now_ms)


def test_a_record_with_a_trace_parent_keeps_it_when_its_records_are_packed_again():
    desk = Desk(listing(1))
    for number in range(40):
        if number % 2:
            put_tagged(desk, b"%d" % number, f"key-{number}")
        else:
            desk.put(b"%d" % number, f"key-{number}")
    desk.tick()
    (entry,) = desk.calls[0].entries
    assert sorted(open_aggregate(entry.data).trace_parents) == list(range(1, 40, 2))
    # It landed in a child of its shard, where not all of its records belong: all are sent again, to both children.
    desk.answer(PutRecordsResultEntry("77", shard_id(1)))
    desk.tick()
    desk.list([shard(1, 0, MIDDLE - 1), shard(2, MIDDLE)])
    desk.tick(10_000)
    found = {}
    for call in desk.calls:
        for entry in call.entries:
            aggregate = open_aggregate(entry.data)
            for index, (key, _, _) in enumerate(aggregate.sub_records()):
                found[key] = aggregate.trace_parents.get(index)
    assert found == {f"key-{number}": PARENT if number % 2 else None for number in range(40)}


@pytest.mark.parametrize("wraps", [False, True])
def test_a_lone_record_with_a_trace_parent_is_wrapped_only_if_that_is_wanted(wraps):
    desk = Desk(listing(1), settings=ProducerSettings(trace="wrap" if wraps else True))
    record = put_tagged(desk, b"alone", "k")
    desk.tick()
    (entry,) = desk.calls[0].entries
    if wraps:
        assert opened(entry) == [("k", b"alone")]
        assert open_aggregate(entry.data).trace_parents == {0: PARENT}
    else:
        assert entry.data == b"alone"
    desk.answer(written(77))
    assert record.put_result.sub_sequence_number == (0 if wraps else -1)


def test_the_largest_record_with_a_trace_parent_fits_when_it_is_wrapped():
    desk = Desk(listing(1), settings=ProducerSettings(trace="wrap"))
    key = "\N{GRINNING FACE}" * 256
    put_tagged(desk, bytes(desk.writer.tagged_bytes_max), key)
    desk.tick()
    (entry,) = desk.calls[0].entries
    assert len(entry.data) + len(entry.partition_key.encode()) <= MIB
    assert open_aggregate(entry.data) is not None
