"""The demo's audit counts what became of records, and knows neither side."""

from anabranch._demo.audit import Handling, judge, recovery_seconds

PUT = {0: "a", 1: "a", 2: "b", 3: "a"}
SECOND_NS = 1_000_000_000


def handled(*numbers, shard_id="one", worker="w"):
    return [Handling(at_ns, number, PUT.get(number, "a"), shard_id, worker) for at_ns, number in enumerate(numbers)]


def test_every_record_once_and_in_order_is_clean():
    verdict = judge(PUT, handled(0, 2, 1, 3))
    assert (verdict.put, verdict.handled, verdict.lost, verdict.out_of_order, verdict.repeated) == (4, 4, 0, 0, 0)
    assert verdict.is_clean


def test_a_record_that_nobody_handled_is_lost():
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
        Handling(1 * SECOND_NS, 0, "a", "one", "w"),
        Handling(3 * SECOND_NS, 1, "a", "one", "w"),
        Handling(5 * SECOND_NS, 2, "b", "two", "w"),
        Handling(9 * SECOND_NS, 3, "a", "one", "w"),
    ]
    assert recovery_seconds(2 * SECOND_NS, ["one", "two"], handlings) == 3.0
    assert recovery_seconds(2 * SECOND_NS, ["one", "three"], handlings) is None


def test_what_a_killed_worker_still_wrote_is_no_recovery():
    handlings = [Handling(3 * SECOND_NS, 0, "a", "one", "killed"), Handling(4 * SECOND_NS, 1, "a", "one", "other")]
    assert recovery_seconds(2 * SECOND_NS, ["one"], handlings, not_by="killed") == 2.0
