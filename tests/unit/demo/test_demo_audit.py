"""The demo's audit counts the outcome of each record, without knowing which program it audits."""

import re
from xml.etree import ElementTree as ET

from anabranch._demo.audit import Audit, HandledRecord, PutRecord, Recovery, judge, recovery_seconds
from anabranch._demo.picture import draw
from anabranch._demo.stage import RiverRow, ShardView
from anabranch.limits import HASH_KEY_MAX

PUT = {
    0: PutRecord("a", "one"),
    1: PutRecord("a", "one"),
    2: PutRecord("b", "two"),
    3: PutRecord("a", "one"),
}
SECOND_NS = 1_000_000_000


def handled(*numbers, worker="w"):
    return [HandledRecord(at_ns, number, worker) for at_ns, number in enumerate(numbers)]


def test_every_record_once_and_in_order_is_clean():
    verdict = judge(PUT, handled(0, 2, 1, 3))
    assert (verdict.put, verdict.handled, verdict.lost, verdict.out_of_order, verdict.repeated) == (4, 4, 0, 0, 0)
    assert verdict.is_clean


def test_a_record_that_was_not_handled_is_lost():
    verdict = judge(PUT, handled(0, 1, 3))
    assert (verdict.handled, verdict.lost, verdict.is_clean) == (3, 1, False)


def test_a_record_after_a_later_one_of_its_key_is_out_of_order():
    verdict = judge(PUT, handled(0, 3, 1, 2))
    assert (verdict.lost, verdict.out_of_order, verdict.is_clean) == (0, 1, False)


def test_a_second_handling_is_a_repeat_and_neither_lost_nor_out_of_order():
    verdict = judge(PUT, handled(0, 1, 2, 3, 0, 1))
    assert (verdict.handled, verdict.repeated, verdict.is_clean) == (4, 2, True)


def test_handlings_are_ordered_by_their_clock_and_those_of_nothing_put_do_not_count():
    assert judge(PUT, reversed(handled(0, 1, 2, 3))).is_clean
    assert judge(PUT, handled(-1, 0, 1, 2, 3, 99)).handled == 4


def test_recovery_lasts_until_the_last_shard_is_handled_again():
    handlings = [
        HandledRecord(1 * SECOND_NS, 0, "w"),
        HandledRecord(3 * SECOND_NS, 1, "w"),
        HandledRecord(5 * SECOND_NS, 2, "w"),
        HandledRecord(9 * SECOND_NS, 3, "w"),
    ]
    assert recovery_seconds(2 * SECOND_NS, ["one", "two"], PUT, handlings) == 3.0
    assert recovery_seconds(6 * SECOND_NS, ["one", "two"], PUT, handlings) is None


def test_a_shard_without_records_is_not_waited_for():
    """The child of a split that was merged before anything was written to it."""
    handlings = [HandledRecord(3 * SECOND_NS, 0, "w")]
    assert recovery_seconds(2 * SECOND_NS, ["one", "merged"], PUT, handlings) == 1.0


def test_what_a_killed_worker_still_wrote_is_no_recovery():
    handlings = [HandledRecord(3 * SECOND_NS, 0, "killed"), HandledRecord(4 * SECOND_NS, 1, "other")]
    assert recovery_seconds(2 * SECOND_NS, ["one"], PUT, handlings, not_by="killed") == 2.0


def test_the_picture_shows_the_audit_and_fits_a_screen():
    verdict = judge(PUT, handled(0, 1, 2, 3))
    audit = Audit(7, verdict, {"plain": verdict}, (Recovery("a split", 21.0, {"plain": None, "anabranch": 0.2}),))
    half = HASH_KEY_MAX // 2
    shards = (
        ShardView("one", 0, half, "one", is_open=True),
        ShardView("two", half + 1, HASH_KEY_MAX, None, is_open=True),
    )
    drawn = draw([RiverRow(0.0, shards, ()), RiverRow(5.0, shards, ("split 0", "throttled"))], audit)
    texts = [text.text for text in ET.fromstring(drawn).iter("{http://www.w3.org/2000/svg}text")]
    assert {"split 0", "throttled", "plain loop", "not handled", "read after a split", "> 21 s", "0.2 s"} <= set(texts)
    assert int(re.search(r'viewBox="0 0 1000 (\d+)"', drawn)[1]) <= 720
