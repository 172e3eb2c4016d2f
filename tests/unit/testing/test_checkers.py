"""Each checker is silent about a run that keeps its promise, and complains about one that breaks it."""

import hashlib

import pytest
from msgspec.structs import replace

from anabranch._model.leases import Checkpoint, Finish, LeaseKey, LeaseRow, OpenKey, Stopped
from anabranch._model.streams import Position
from anabranch.records import Attempt, PutResult
from anabranch.testing.checkers import (
    Call,
    CheckpointAdvances,
    ChildrenFirst,
    Commit,
    Duplicates,
    Journal,
    NoFalseSuccess,
    NoLoss,
    NoOverlap,
    NoStandstill,
    OneBirth,
    OneOwner,
    OrderPerKey,
    ParentsFirst,
    QuietTransfers,
    ShardOpened,
    WithinBudget,
    WriteOutcomes,
    Written,
    all_checkers,
)

KEY = LeaseKey("1:orders:1", 0, "P")


def call(number, *, process="a", token=1, key="k", shard="P", was_paused=False, batch=0):
    return Call(number, process, shard, Position(number), key, token, was_paused, batch)


def written(number, *, key="k", shard="P"):
    return Written(shard, Position(number), key)


def commit(number, *, version=1, epoch=1, finish=None, frontier=None, open_keys=()):
    checkpoint = Checkpoint(
        None if number is None else Position(number),
        None if frontier is None else Position(frontier),
        open_keys,
        order="key",
    )
    return Commit(0, LeaseRow(key=KEY, version=version, epoch=epoch, checkpoint=checkpoint, finish=finish))


def complaints(checker, *events):
    journal = Journal([checker])
    for name, event in events:
        getattr(journal, name)(event)
    journal.ended(99)
    return [violation.what for violation in journal.violations]


def handled(number, **options):
    return [("started", call(number, **options)), ("finished", call(number, **options))]


TWO = [("written", written(1)), ("written", written(2))]


def test_records_of_a_key_in_order_are_fine_also_when_they_are_repeated():
    assert complaints(OrderPerKey(), *TWO, *handled(1), *handled(2), *handled(1, token=2), *handled(2, token=2)) == []


def test_a_record_before_an_earlier_one_of_its_key_is_found():
    assert "was not finished" in complaints(OrderPerKey(), *TWO, ("started", call(2)))[0]


def test_records_of_other_keys_do_not_wait():
    both = [("written", written(1)), ("written", written(2, key="other"))]
    assert complaints(OrderPerKey(), *both, ("started", call(1)), ("started", call(2, key="other"))) == []


def test_two_calls_of_a_key_at_once_are_found():
    found = complaints(OrderPerKey(), *TWO, ("started", call(1)), ("started", call(1)))
    assert "starts beside" in found[0]


def test_a_call_that_was_cancelled_may_be_made_again():
    events = [("started", call(1)), ("abandoned", call(1)), *handled(1)]
    assert complaints(OrderPerKey(), *TWO, *events) == []


def test_going_back_in_one_holding_is_found():
    found = complaints(OrderPerKey(), *TWO, *handled(1), *handled(2), *handled(1))
    assert "in the same holding" in found[0]


def test_the_records_of_a_batch_start_together_and_come_again_together():
    first, second = call(1, batch=1), call(2, batch=1)
    both = [("started", first), ("started", second)]
    failed = [*both, ("abandoned", first), ("abandoned", second)]
    again = [("started", call(1, batch=2)), ("started", call(2, batch=2))]
    assert complaints(OrderPerKey(), *TWO, *failed, *again) == []
    assert "starts beside" in complaints(OrderPerKey(), *TWO, *both, *again)[0]


def test_a_batch_without_a_record_before_it_is_found():
    three = [*TWO, ("written", written(3))]
    batch = [("started", call(2, batch=1)), ("started", call(3, batch=1))]
    assert "was not finished" in complaints(OrderPerKey(), *three, *batch)[0]


def test_what_the_stream_has_lost_is_not_waited_for_once_the_consumer_has_said_so():
    family = [("opened", ShardOpened("C", ("P",))), *TWO, ("written", written(3, shard="C"))]
    rest = [*handled(1), *handled(3, shard="C"), ("committed", commit(2))]
    for checker in (OrderPerKey, ParentsFirst, NoLoss, NoStandstill):
        assert complaints(checker(), *family, ("excused", written(2)), *rest) == []
        assert complaints(checker(), *family, *rest)


def test_a_commit_past_an_unfinished_record_is_found():
    assert complaints(NoLoss(), *TWO, *handled(1), ("committed", commit(1))) == []
    assert "was not finished" in complaints(NoLoss(), *TWO, *handled(1), ("committed", commit(2)))[0]
    assert complaints(NoLoss(), *TWO, *handled(1), ("committed", commit(1, finish=Finish("end"))))
    assert complaints(NoLoss(), *TWO, ("committed", commit(None))) == []


def test_what_lies_above_the_watermark_is_covered_unless_its_key_is_open():
    digest = hashlib.blake2b(b"k", digest_size=8).digest()
    both = [("written", written(1, key="slow")), ("written", written(2)), *handled(2)]
    slow = OpenKey(hashlib.blake2b(b"slow", digest_size=8).digest(), Position(1))
    assert complaints(NoLoss(), *both, ("committed", commit(0, frontier=2, open_keys=(slow,)))) == []
    assert complaints(NoLoss(), *both, ("committed", commit(0, frontier=2, open_keys=(OpenKey(digest, Position(2)),))))


def test_handling_again_what_was_committed_is_found():
    repeat = ("started", call(1, token=2))
    assert complaints(Duplicates(), *TWO, *handled(1), repeat) == []
    assert (
        "although it was committed" in complaints(Duplicates(), *TWO, *handled(1), ("committed", commit(1)), repeat)[0]
    )


def test_handling_again_what_was_finished_before_an_end_in_order_is_found():
    def repeated(*, loses):
        journal = Journal([Duplicates()])
        journal.started(call(1))
        if loses:
            journal.lost("a", "P")
        journal.finished(call(1))
        journal.stopped(2, "a", 0)
        journal.started(call(1, process="b", token=2))
        return [violation.what for violation in journal.violations]

    assert repeated(loses=True) == []
    assert "a had finished it and ended in order" in repeated(loses=False)[0]


def owned(at_ms, process, *, token=1, stopped=None):
    row = LeaseRow(key=KEY, epoch=token, owner=f"{process}#1", stopped=stopped)
    return Commit(at_ms, row)


def repeated_after_a_crash(*between, finished_ms=1_000, died_ms=3_000, before=()):
    """What is said when "a" finishes a record and dies, and "b" handles it again; `between` happens meanwhile."""
    journal = Journal([Duplicates(commit_ms=1_500)])
    journal.owned("a", owned(0, "a"))
    for name, *arguments in before:
        getattr(journal, name)(*arguments)
    journal.started(call(1))
    journal.finished(replace(call(1), at_ms=finished_ms))
    for name, *arguments in between:
        getattr(journal, name)(*arguments)
    journal.died(died_ms, "a")
    journal.owned("b", owned(13_000, "b", token=2))
    journal.started(replace(call(1, process="b", token=2), at_ms=14_000))
    return [violation.what for violation in journal.violations]


def test_handling_again_what_should_have_been_committed_is_found():
    assert "a had finished it at 1.000 s and could have committed it for 2000 ms" in repeated_after_a_crash()[0]
    assert repeated_after_a_crash(finished_ms=1_501) == []


def test_handling_again_what_was_finished_before_a_hand_off_is_found():
    given = ("committed", owned(1_200, "b", token=2))
    assert "a finished it before it gave the shard away" in repeated_after_a_crash(given)[0]


def test_the_time_in_which_a_process_cannot_commit_does_not_count():
    assert repeated_after_a_crash(("hindered", "a", 1_400, 1_600)) == []
    assert repeated_after_a_crash(("hindered", "b", 1_400, 1_600)) != []
    assert repeated_after_a_crash(("hindered", "a", 2_600, 3_500)) != []  # it could before
    assert repeated_after_a_crash(("hindered", "a", 0, 1_400)) != []  # and here, after


def test_what_finishes_after_the_lease_was_lost_is_not_to_be_committed():
    assert repeated_after_a_crash(("left", 2_000, "a#1")) == []
    assert repeated_after_a_crash(("left", 2_000, "a#2")) != []
    assert repeated_after_a_crash(("owned", None, owned(2_000, "nobody"))) == []
    assert repeated_after_a_crash(("store_went_back",)) == []
    assert repeated_after_a_crash(before=[("owned", "c", owned(500, "c", token=7))]) == []


def test_what_finishes_after_its_shard_was_stopped_is_not_to_be_committed():
    stopped = Stopped(reason="a record", position=None, partition_key=None, member_id="a#1", at_wall_ms=0)
    assert repeated_after_a_crash(("committed", owned(2_000, "a", stopped=stopped))) == []
    assert repeated_after_a_crash(("committed", owned(2_000, "a"))) != []


def test_what_lies_beyond_a_thousand_open_records_is_not_to_be_committed():
    def repeated(open_count):
        records = [call(number, key=f"key-{number}") for number in range(-open_count, 0)]
        return repeated_after_a_crash(before=[("started", record) for record in records])

    assert repeated(1_001) == []
    assert repeated(1_000) != []


def test_a_shard_that_is_finished_before_its_children_have_rows_is_found():
    child = Commit(0, LeaseRow(key=LeaseKey("1:orders:1", 0, "C")))
    end = ("committed", commit(1, finish=Finish("end", ("C",))))
    assert complaints(ChildrenFirst(), ("created", child), end) == []
    assert "C has no row" in complaints(ChildrenFirst(), end)[0]


def test_an_owner_that_comes_back_after_the_next_one_is_found():
    first, second = ("started", call(1)), ("started", call(2, process="b", token=2))
    assert complaints(OneOwner(), first, second) == []
    assert "stale dispatch" in complaints(OneOwner(), first, second, ("started", call(3)))[0]


def test_a_call_that_was_paused_before_its_start_is_a_zombie_and_no_second_owner():
    journal = Journal([OneOwner()])
    for event in (call(1), call(2, process="b", token=2), call(3, was_paused=True)):
        journal.started(event)
    assert journal.violations == []
    assert journal.zombies == 1


def overlap(checker, *between, at_ms=20_000, batch=0):
    """A call of process a runs while b takes the shard, and then starts the same record."""
    journal = Journal([checker])
    journal.owned("a", Commit(0, LeaseRow(key=KEY, owner="a#1", epoch=1)))
    journal.started(call(1, batch=batch))
    for name, *details in between:
        getattr(journal, name)(*details)
    journal.owned("b", Commit(at_ms, LeaseRow(key=KEY, owner="b#1", epoch=2)))
    journal.started(replace(call(1, process="b", token=2), at_ms=at_ms))
    return [violation.what for violation in journal.violations]


@pytest.mark.parametrize("checker", [NoOverlap, QuietTransfers])
def test_a_call_that_runs_while_another_owner_takes_its_shard_is_found(checker):
    assert "runs since" in overlap(checker())[0]
    assert overlap(checker(), ("finished", call(1))) == []
    assert overlap(checker(), ("abandoned", call(1))) == []
    assert overlap(checker(), ("died", 5, "a")) == []


@pytest.mark.parametrize("checker", [NoOverlap, QuietTransfers])
def test_a_call_that_was_reported_as_a_zombie_or_could_not_be_is_excused(checker):
    assert overlap(checker(), ("zombie", "a", "P", Position(1))) == []
    assert len(overlap(checker(), ("zombie", "a", "P", Position(2)))) == 1
    companion = call(2, batch=7)
    assert overlap(checker(), ("started", companion), ("zombie", "a", "P", Position(2)), batch=7) == []
    assert overlap(checker(), ("halted", "a", 15_000)) == []
    assert len(overlap(checker(), ("halted", "a", 10_000))) == 1
    assert overlap(checker(), ("store_emptied", ["a"])) == []


def test_a_call_that_runs_when_its_member_gives_up_its_leases_is_found():
    assert "a#1 gives up its leases" in overlap(QuietTransfers(), ("left", 5, "a#1"), ("finished", call(1)))[0]
    assert overlap(QuietTransfers(), ("left", 5, "c#1"), ("finished", call(1))) == []


def test_tokens_that_go_back_or_are_shared_are_found():
    parent, child = ("started", call(1, token=3)), ("started", call(2, shard="C", token=1))
    assert "goes back" in complaints(OneOwner(), parent, child)[0]
    assert "one fence token" in complaints(OneOwner(), parent, ("started", call(2, process="b", token=3)))[0]


def test_after_a_store_went_back_tokens_may_repeat_but_owners_may_not_come_back():
    journal = Journal([OneOwner()])
    journal.started(call(1))
    journal.store_went_back()
    journal.started(call(2, process="b"))
    assert journal.violations == []
    journal.started(call(3))
    assert "stale dispatch" in journal.violations[0].what


def test_what_goes_on_with_an_emptied_store_counts_for_nothing_and_must_not_begin_anew():
    journal = Journal([OneOwner(), OneBirth()])
    journal.started(call(1))
    journal.store_emptied(["a"])
    journal.started(call(1, process="b"))
    journal.made(2, "b", "a lease")
    journal.started(call(2))
    assert journal.violations == []
    assert journal.zombies == 1
    journal.made(3, "a", "a lease")
    assert "a had worked before" in journal.violations[0].what


def test_a_checkpoint_a_version_or_an_epoch_that_goes_back_is_found():
    first = ("committed", commit(5, version=2, epoch=2))
    assert complaints(CheckpointAdvances(), first, ("committed", commit(6, version=3, epoch=2))) == []
    for worse in (commit(4, version=3, epoch=2), commit(5, version=2, epoch=2), commit(6, version=3, epoch=1)):
        assert len(complaints(CheckpointAdvances(), first, ("committed", worse))) == 1
    end = ("committed", commit(5, version=3, epoch=2, finish=Finish("end")))
    assert (
        "after its end" in complaints(CheckpointAdvances(), first, end, ("committed", commit(5, version=4, epoch=2)))[0]
    )


def test_a_child_before_its_parents_end_is_found():
    family = [("opened", ShardOpened("C", ("P",))), *TWO, ("written", written(3, shard="C"))]
    early = ("started", call(3, shard="C"))
    assert "of its parent P" in complaints(ParentsFirst(), *family, *handled(1), early)[0]
    assert complaints(ParentsFirst(), *family, *handled(1), *handled(2), early) == []


def test_bytes_over_the_budget_are_found():
    journal = Journal([WithinBudget()])
    journal.measured(1, "a", 10, 10)
    assert journal.violations == []
    journal.measured(2, "a", 11, 10)
    assert "holds 11 of 10 bytes" in journal.violations[0].what
    journal.stopped(3, "a", 0)
    journal.stopped(4, "b", 5)
    assert "5 bytes are not given back" in journal.violations[1].what


def test_records_that_nobody_finished_are_found():
    assert complaints(NoStandstill(), *TWO, *handled(1), *handled(2)) == []
    assert "1 records were never finished" in complaints(NoStandstill(), *TWO, *handled(1))[0]


def test_errors_that_nobody_saw_are_violations_until_the_run_is_taken_down():
    journal = Journal(all_checkers())
    journal.failed(5, "task died")
    journal.is_closed = True
    journal.failed(6, "cancelled")
    journal.started(call(1))
    assert [str(violation) for violation in journal.violations] == ["at 0.005 s: nothing ends unseen: task died"]


@pytest.mark.parametrize("checker", all_checkers())
def test_a_clean_run_satisfies_every_checker(checker):
    events = [*TWO, *handled(1), ("committed", commit(1)), *handled(2), ("committed", commit(2, version=2))]
    assert complaints(checker, *events) == []


def outcomes(*results, reads=(), keeps_order=True):
    """What is said of puts with these results, and of a stream that then holds these."""
    checker = WriteOutcomes(keeps_order=keeps_order)
    for result in results:
        checker.put(result.data, result.partition_key)
    for result in results:
        checker.told(1, result)
    for number, data in reads:
        checker.read(data, "P", Position(number))
    checker.ended(9)
    return [violation.what for violation in checker.violations]


def put_result(data, number=None, *, maybe_written=False, hash_key=None):
    delivered = number is not None
    attempt = Attempt(started_seconds=0.0, duration_seconds=0.0, code=None if delivered else "Oops", message=None)
    return PutResult(
        stream="orders", partition_key="k", data=data, explicit_hash_key=hash_key, maybe_written=maybe_written,
        shard_id="P" if delivered else None, sequence_number=str(number) if delivered else None, attempts=(attempt,),
    )  # fmt: skip


def test_true_outcomes_are_believed():
    open_end = put_result(b"c", maybe_written=True)
    assert outcomes(put_result(b"a", 1), put_result(b"b"), open_end, reads=[(1, b"a"), (2, b"c"), (3, b"a")]) == []


def test_false_outcomes_are_found():
    assert "was told to be at" in outcomes(put_result(b"a", 1), reads=[(2, b"a")])[0]
    assert "failed for certain, but is at" in outcomes(put_result(b"a"), reads=[(2, b"a")])[0]


def test_a_put_without_an_outcome_or_with_two_is_found():
    checker = WriteOutcomes(keeps_order=True)
    checker.put(b"a", "k")
    checker.put(b"b", "k")
    checker.told(1, put_result(b"b"))
    checker.told(2, put_result(b"b"))
    checker.ended(9)
    assert [violation.what for violation in checker.violations] == [
        "b'b' was told two outcomes",
        "b'a' has no outcome",
    ]


def test_a_refused_put_leaves_nothing_in_the_stream():
    checker = WriteOutcomes(keeps_order=True)
    checker.put(b"a", "k")
    checker.refused(b"a")
    checker.ended(8)
    assert checker.violations == []
    checker.read(b"a", "P", Position(1))
    checker.ended(9)
    assert "was refused, but is at" in checker.violations[0].what


def test_writes_out_of_order_are_found_where_order_is_kept():
    swapped = {"reads": [(1, b"b"), (2, b"a")]}
    assert "is in the stream before b'a'" in outcomes(put_result(b"a", 2), put_result(b"b", 1), **swapped)[0]
    assert outcomes(put_result(b"a", 2), put_result(b"b", 1), keeps_order=False, **swapped) == []
    assert outcomes(put_result(b"a", 2), put_result(b"b", 1, hash_key="7"), **swapped) == []


def test_success_is_false_while_a_shard_that_the_process_holds_is_stopped():
    def outcome(*, stopped, owner="a"):
        stop = Stopped(reason="no such customer", position=Position(4), partition_key="k", member_id="m", at_wall_ms=0)
        checker = NoFalseSuccess()
        journal = Journal([checker])
        row = replace(commit(3).row, stopped=stop)
        journal.owned(owner, Commit(0, row))
        journal.committed(Commit(0, row))
        if not stopped:
            journal.committed(commit(4))
        journal.succeeded(7, "a")
        return [violation.what for violation in journal.violations]

    assert outcome(stopped=False) == []
    assert outcome(stopped=True, owner="b") == []
    assert outcome(stopped=True) == ["a ended by itself and reported success, but P is stopped at 4: no such customer"]
