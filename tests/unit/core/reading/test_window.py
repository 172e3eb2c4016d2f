"""The records that were read and not yet handed out, and what they weigh."""

from anabranch._core.reading.window import RECORD_OVERHEAD_BYTES, Page, cost_of
from anabranch._model.streams import Position
from shard_records import aggregated, make_window, places, plain, pull_all

COST = 7 + 1 + RECORD_OVERHEAD_BYTES  # b"payload" under a key of one letter


def test_a_record_costs_its_bytes_and_an_overhead():
    assert cost_of([plain(1), plain(2)]) == 2 * COST
    assert cost_of([]) == 0
    ((record, _),) = pull_all(make_window(plain(1)))
    assert cost_of([record]) == COST


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
    charged = window._held_bytes
    pulled = pull_all(window)
    assert cost_of([record for record, _ in pulled]) > charged
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
