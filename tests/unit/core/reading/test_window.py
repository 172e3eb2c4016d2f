"""From the records of a read to those that handlers see."""

import pytest

from anabranch._core.reading.window import RECORD_OVERHEAD_BYTES, SLICE_RECORDS, Page, Sizes, Unpacker, Window
from anabranch._model.hash_keys import HashKeyRange, md5_hash_key
from anabranch._model.streams import Position
from anabranch._wire.aggregate import MAGIC, PRODUCER_TAG
from anabranch.limits import HASH_KEY_MAX
from shard_records import SHARD, STREAM, aggregated, make_record, make_window, places, plain, pull_all

LOWER, UPPER = HashKeyRange(0, HASH_KEY_MAX // 2), HashKeyRange(HASH_KEY_MAX // 2 + 1, HASH_KEY_MAX)
AT_HOME, ASTRAY = "k1", "k0"
assert md5_hash_key(AT_HOME) in UPPER
assert md5_hash_key(ASTRAY) in LOWER
STRADDLING = ((AT_HOME, b"1"), (ASTRAY, b"2"), (AT_HOME, b"3"))


def unpack(records, after=None, **options):
    unpacker = Unpacker(STREAM, SHARD, options.pop("hash_key_range", None), **options)
    return [record for some in unpacker.unpack(records, after) for record in some.records], unpacker


def test_a_plain_record_is_passed_on_as_it_is():
    (record,), _ = unpack([plain(7, "key", b"data")])
    assert record == make_record(7, "key", data=b"data")


def test_an_aggregate_is_opened_into_records_of_its_sequence_number():
    records, _ = unpack([aggregated(7, ("a", b"1"), ("b", b"2", "99"))])
    assert places(records) == [(7, 0), (7, 1)]
    assert [(r.partition_key, r.explicit_hash_key, r.data, r.value) for r in records] == [
        ("a", None, b"1", b"1"),
        ("b", "99", b"2", b"2"),
    ]
    assert {(r.stream, r.shard_id, r.arrival_seconds) for r in records} == {(STREAM, SHARD, 7.0)}


def test_what_only_looks_like_an_aggregate_is_passed_on_as_it_is():
    records, _ = unpack([plain(1, data=MAGIC + bytes(40))])
    assert places(records) == [(1, -1)]


@pytest.mark.parametrize(
    "after, expected",
    [
        (None, [(1, -1), (2, 0), (2, 1), (3, -1)]),
        (Position(0), [(1, -1), (2, 0), (2, 1), (3, -1)]),
        (Position(1), [(2, 0), (2, 1), (3, -1)]),
        (Position(2), [(2, 0), (2, 1), (3, -1)]),
        (Position(2, 0), [(2, 1), (3, -1)]),
        (Position(2, 1), [(3, -1)]),
        (Position(2, 1 << 62), [(3, -1)]),
        (Position(3), []),
        (Position(9), []),
    ],
)
def test_what_lies_at_or_before_the_given_position_is_dropped(after, expected):
    read = [plain(1), aggregated(2, ("a", b""), ("b", b"")), plain(3)]
    assert places(unpack(read, after)[0]) == expected


def test_aggregates_and_plain_records_are_made_a_stretch_at_a_time():
    read = [plain(1), aggregated(2, *[("a", b"")] * (SLICE_RECORDS + 1))]
    read += [plain(number) for number in range(3, 4 + 2 * SLICE_RECORDS)]
    slices = [some.records for some in Unpacker(STREAM, SHARD, None).unpack(read, None)]
    assert sum(len(some) for some in slices) == len(read) + SLICE_RECORDS
    assert all(len(some) < 2 * SLICE_RECORDS for some in slices)


def test_small_aggregates_share_a_stretch():
    read = [aggregated(number, ("a", b""), ("b", b"")) for number in range(SLICE_RECORDS)]
    slices = [some.records for some in Unpacker(STREAM, SHARD, None).unpack(read, None)]
    assert [len(some) for some in slices] == [SLICE_RECORDS, SLICE_RECORDS]


def test_a_full_last_stretch_is_not_followed_by_an_empty_one():
    slices = list(Unpacker(STREAM, SHARD, None).unpack([plain(n) for n in range(SLICE_RECORDS)], None))
    assert [len(some.records) for some in slices] == [SLICE_RECORDS]


@pytest.mark.parametrize("policy", ["by_writer", "deliver"])
def test_a_misrouted_sub_record_of_another_writer_is_delivered_and_marked(policy):
    records, unpacker = unpack([aggregated(1, *STRADDLING)], hash_key_range=UPPER, misrouted=policy)
    assert [record.misrouted for record in records] == [False, True, False]
    assert unpacker.take_counts() == (1, 0)
    assert unpacker.take_counts() == (0, 0)


@pytest.mark.parametrize(
    "policy, tags, delivered",
    [
        ("by_writer", (PRODUCER_TAG,), False),
        ("deliver", (PRODUCER_TAG,), True),
        ("skip", (), False),
        ("skip", (PRODUCER_TAG,), False),
    ],
)
def test_an_aggregate_that_its_producer_sends_again_is_skipped_whole(policy, tags, delivered):
    read = [plain(1), aggregated(2, *STRADDLING, tags=tags), plain(3)]
    records, unpacker = unpack(read, hash_key_range=UPPER, misrouted=policy)
    middle = [(2, 0), (2, 1), (2, 2)] if delivered else []
    assert places(records) == [(1, -1), *middle, (3, -1)]
    assert unpacker.take_counts() == ((1, 0) if delivered else (0, 1))


@pytest.mark.parametrize("policy", ["by_writer", "skip"])
def test_an_aggregate_at_home_is_never_skipped(policy):
    read = [aggregated(1, (AT_HOME, b""), (ASTRAY, b"", str(UPPER.start)), tags=(PRODUCER_TAG,))]
    records, unpacker = unpack(read, hash_key_range=UPPER, misrouted=policy)
    assert [record.misrouted for record in records] == [False, False]
    assert unpacker.take_counts() == (0, 0)


def test_only_strays_that_are_delivered_are_counted():
    _, unpacker = unpack([aggregated(1, *STRADDLING)], Position(1, 0), hash_key_range=UPPER)
    assert unpacker.take_counts() == (1, 0)
    _, unpacker = unpack([aggregated(1, *STRADDLING)], Position(1, 1), hash_key_range=UPPER)
    assert unpacker.take_counts() == (0, 0)


def test_an_aggregate_that_was_handled_before_is_not_counted_as_skipped():
    read = [aggregated(1, *STRADDLING, tags=(PRODUCER_TAG,))]
    records, unpacker = unpack(read, Position(1, 2), hash_key_range=UPPER)
    assert records == []
    assert unpacker.take_counts() == (0, 0)


def test_without_a_range_nothing_is_called_astray():
    records, unpacker = unpack([aggregated(1, *STRADDLING, tags=(PRODUCER_TAG,))])
    assert [record.misrouted for record in records] == [False] * 3
    assert unpacker.take_counts() == (0, 0)


def test_from_the_first_record_of_the_end_time_on_everything_is_left_alone():
    unpacker = Unpacker(STREAM, SHARD, None, until_seconds=3.0)
    assert places(next(unpacker.unpack([plain(1), plain(2)], None)).records) == [(1, -1), (2, -1)]
    assert not unpacker.reached_until
    assert [places(some.records) for some in unpacker.unpack([plain(2), plain(3), plain(1)], None)] == [[(2, -1)]]
    assert unpacker.reached_until
    assert list(unpacker.unpack([plain(1)], None)) == []


COST = 7 + 1 + RECORD_OVERHEAD_BYTES  # b"payload" under a key of one letter


def test_a_record_costs_its_bytes_and_an_overhead():
    sizes = Sizes([plain(1), plain(2)])
    assert (sizes.cost(0, 2), sizes.cost(1, 2), sizes.cost(1, 1)) == (2 * COST, COST, 0)
    ((record, _),) = pull_all(make_window(plain(1)))
    assert Sizes([record]).cost(0, 1) == COST


def test_a_read_that_resumes_inside_a_page_costs_what_is_left_of_it():
    records = [plain(number, data=bytes(number)) for number in range(1, 2 * SLICE_RECORDS)]
    window = Window(Unpacker(STREAM, SHARD, None))
    charged = window.accept(records, Position(3))
    last = None
    while (pulled := window.pull_some(9, 1 << 20)) is not None:
        assert pulled.cost == Sizes(pulled.records).cost(0, len(pulled.records))
        window.finish_some(pulled)
        last = pulled.records[-1].sequence_number
    assert last == records[-1].sequence_number
    assert window.collect_freed() == charged


def test_a_page_is_charged_whole_while_records_are_to_come_out_of_it():
    page = Page([plain(1), plain(2)], Position(0))
    assert (page.charged_bytes, page.after) == (2 * COST, Position(0))
    page.take(COST)
    assert page.finish(COST) == 0


def test_a_drained_page_is_charged_what_is_unfinished():
    page = Page([plain(1), plain(2), plain(3)], None)
    for _ in range(3):
        page.take(COST)
    assert page.finish(COST) == 0
    assert page.drain() == COST
    assert page.records == ()
    assert page.finish(COST) == COST
    assert page.charged_bytes == COST
    assert page.finish(COST) == COST
    assert page.charged_bytes == 0


def test_an_aggregate_whose_records_weigh_more_than_it_is_charged_no_more_than_its_page():
    window = make_window(aggregated(1, *[("k", b"")] * 100))
    charged = window.held_bytes
    pulled = pull_all(window)
    assert Sizes([record for record, _ in pulled]).cost(0, 100) > charged
    assert window.collect_freed() == 0
    for record, page in pulled:
        window.finish(record, page)
    assert window.collect_freed() == charged


def test_records_come_out_in_stream_order_over_pages():
    window = make_window(plain(1), plain(2))
    window.accept([aggregated(3, ("a", b""), ("b", b""))], None)
    window.accept([plain(4)], None)
    assert window.peek().sequence_number == "1"
    assert places(record for record, _ in pull_all(window)) == [(1, -1), (2, -1), (3, 0), (3, 1), (4, -1)]
    assert window.peek() is None
    assert window.is_empty


def test_records_come_out_together_as_far_as_count_and_bytes_allow():
    window = make_window(*(plain(number, data=bytes(10)) for number in range(1, 8)), plain(8, data=bytes(500)))
    slices = [window.pull_some(count, size) for count, size in ((3, 1000), (9, 25), (9, 20), (9, 100), (9, 100))]
    assert [places(pulled.records) for pulled in slices[:4]] == [
        [(1, -1), (2, -1), (3, -1)],
        [(4, -1), (5, -1)],
        [(6, -1), (7, -1)],
        [(8, -1)],
    ]
    assert [pulled.data_bytes for pulled in slices[:4]] == [30, 20, 20, 500]
    assert slices[4] is None


def test_what_is_peeked_at_is_what_comes_out_together():
    window = make_window(plain(1), plain(2), plain(3))
    assert places(window.peek_some(2, 1 << 20)) == [(1, -1), (2, -1)]
    assert places(window.peek_some(9, 1)) == [(1, -1)]
    upcoming = window.peek_some(9, 1 << 20)
    assert window.pull_some(9, 1 << 20).records == upcoming
    assert window.peek_some(9, 1 << 20) == []


def test_one_by_one_and_together_may_be_mixed():
    window = make_window(*(plain(number) for number in range(1, 5)))
    one, page = window.pull()
    rest = window.pull_some(9, 1000)
    assert places([one, *rest.records]) == [(1, -1), (2, -1), (3, -1), (4, -1)]
    window.finish_some(rest)
    assert window.is_empty
    assert window.collect_freed() == 3 * COST
    window.finish(one, page)
    assert window.collect_freed() == COST


def test_records_that_come_out_together_are_of_one_page():
    window = make_window(plain(1), plain(2))
    window.accept([plain(3)], None)
    first, second = window.pull_some(9, 1000), window.pull_some(9, 1000)
    assert (places(first.records), places(second.records)) == ([(1, -1), (2, -1)], [(3, -1)])
    assert first.page is not second.page


def test_the_end_of_a_portion_counts_for_nothing_after_the_clearing():
    window = make_window(plain(1))
    pulled = window.pull_some(9, 1000)
    window.clear()
    assert window.collect_freed() == COST
    window.finish_some(pulled)
    assert window.collect_freed() == 0


def test_a_read_resumes_after_the_position_that_it_is_given():
    window = make_window(plain(1), plain(2), after=Position(1))
    assert places(record for record, _ in pull_all(window)) == [(2, -1)]


def test_a_page_with_nothing_new_is_freed_when_it_is_looked_at():
    window = make_window(plain(1), after=Position(1))
    assert window.pull() is None
    assert window.collect_freed() == COST


def test_freed_bytes_are_collected_once():
    window = make_window(plain(1))
    record, page = window.pull()
    window.finish(record, page)
    assert window.collect_freed() == 0  # the page may have more
    assert window.is_empty
    assert window.collect_freed() == COST
    assert window.collect_freed() == 0


def test_clearing_frees_everything_also_what_was_handed_out():
    window = make_window(plain(1), plain(2))
    window.accept([plain(3)], None)
    record, page = window.pull()
    window.clear()
    assert window.collect_freed() == 3 * COST
    assert window.is_empty
    window.finish(record, page)
    assert window.collect_freed() == 0


def test_what_arrives_after_the_clearing_is_forgotten_and_costs_nothing():
    window = make_window(plain(1))
    window.clear()
    assert window.accept([plain(2)], None) == 0
    assert window.is_empty
