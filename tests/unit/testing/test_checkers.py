"""Each checker is silent about a run that keeps its promise, and complains about one that breaks it."""

import hashlib

import pytest
from msgspec.structs import replace

from anabranch._model.leases import Checkpoint, Finish, LeaseKey, LeaseRow, OpenKey, Stopped
from anabranch._model.streams import Position
from anabranch.reasons import StoppedByCrashes, StoppedByHandler
from anabranch.testing.checkers import (
    AttemptsSurvive,
    CheckpointAdvances,
    ChildrenFirst,
    FewDuplicates,
    NoFalseSuccess,
    NoLoss,
    NoOverlap,
    NoStandstill,
    OneOutcome,
    OneOwner,
    OrderPerKey,
    ParentsFirst,
    QuietTransfers,
    WithinBudget,
    all_checkers,
)
from anabranch.testing.journal import (
    BytesMeasured,
    BytesReceived,
    CallAbandoned,
    CallFinished,
    CallStarted,
    CleanStop,
    CommitsBlocked,
    Journal,
    LeaseCommitted,
    LeaseCreated,
    LeaseLossReported,
    LeaseWrite,
    LetterWritten,
    MemberLeft,
    OwnerChanged,
    ProcessDied,
    ProcessHalted,
    RecordCall,
    RecordExcused,
    RecordWritten,
    RunEnded,
    ShardOpened,
    StoreEmptied,
    StoreWentBack,
    StreamRecord,
    SuccessReported,
    UnseenError,
    ZombieReported,
)

KEY = LeaseKey("1:orders:1", 0, "P")


def call(number, *, process="a", token=1, key="k", shard="P", was_paused=False, batch=0):
    return RecordCall(number, process, shard, Position(number), key, token, was_paused, batch)


def written(number, *, key="k", shard="P"):
    return RecordWritten(StreamRecord(shard, Position(number), key))


def commit(number, *, version=1, epoch=1, finish=None, frontier=None, open_keys=()):
    checkpoint = Checkpoint(
        None if number is None else Position(number),
        None if frontier is None else Position(frontier),
        open_keys,
        order="key",
    )
    return LeaseCommitted(
        LeaseWrite(0, LeaseRow(key=KEY, version=version, epoch=epoch, checkpoint=checkpoint, finish=finish))
    )


def complaints(checker, *facts):
    journal = Journal([checker])
    for fact in facts:
        journal.tell(fact)
    journal.tell(RunEnded(99))
    return [violation.what for violation in journal.violations]


def handled(number, **options):
    return [CallStarted(call(number, **options)), CallFinished(call(number, **options))]


TWO = [written(1), written(2)]


def test_records_of_a_key_in_order_are_fine_also_when_they_are_repeated():
    assert complaints(OrderPerKey(), *TWO, *handled(1), *handled(2), *handled(1, token=2), *handled(2, token=2)) == []


def test_a_record_before_an_earlier_one_of_its_key_is_found():
    assert "was not finished" in complaints(OrderPerKey(), *TWO, CallStarted(call(2)))[0]


def test_records_of_other_keys_do_not_wait():
    both = [written(1), written(2, key="other")]
    assert complaints(OrderPerKey(), *both, CallStarted(call(1)), CallStarted(call(2, key="other"))) == []


def test_two_calls_of_a_key_at_once_are_found():
    found = complaints(OrderPerKey(), *TWO, CallStarted(call(1)), CallStarted(call(1)))
    assert "is running" in found[0]


def test_a_call_that_was_cancelled_may_be_made_again():
    events = [CallStarted(call(1)), CallAbandoned(call(1)), *handled(1)]
    assert complaints(OrderPerKey(), *TWO, *events) == []


def test_going_back_in_one_holding_is_found():
    found = complaints(OrderPerKey(), *TWO, *handled(1), *handled(2), *handled(1))
    assert "by the same owner" in found[0]


def test_the_records_of_a_batch_start_together_and_come_again_together():
    first, second = call(1, batch=1), call(2, batch=1)
    both = [CallStarted(first), CallStarted(second)]
    failed = [*both, CallAbandoned(first), CallAbandoned(second)]
    again = [CallStarted(call(1, batch=2)), CallStarted(call(2, batch=2))]
    assert complaints(OrderPerKey(), *TWO, *failed, *again) == []
    assert "is running" in complaints(OrderPerKey(), *TWO, *both, *again)[0]


def test_a_batch_without_a_record_before_it_is_found():
    three = [*TWO, written(3)]
    batch = [CallStarted(call(2, batch=1)), CallStarted(call(3, batch=1))]
    assert "was not finished" in complaints(OrderPerKey(), *three, *batch)[0]


def test_what_the_stream_has_lost_is_not_waited_for_once_the_consumer_has_said_so():
    family = [ShardOpened("C", ("P",)), *TWO, written(3, shard="C")]
    rest = [*handled(1), *handled(3, shard="C"), commit(2)]
    for checker in (OrderPerKey, ParentsFirst, NoLoss, NoStandstill):
        assert complaints(checker(), *family, RecordExcused(written(2).record), *rest) == []
        assert complaints(checker(), *family, *rest)


def test_a_commit_past_an_unfinished_record_is_found():
    assert complaints(NoLoss(), *TWO, *handled(1), commit(1)) == []
    assert "was not finished" in complaints(NoLoss(), *TWO, *handled(1), commit(2))[0]
    assert complaints(NoLoss(), *TWO, *handled(1), commit(1, finish=Finish("end")))
    assert complaints(NoLoss(), *TWO, commit(None)) == []


def test_what_lies_above_the_watermark_is_covered_unless_its_key_is_open():
    digest = hashlib.blake2b(b"k", digest_size=8).digest()
    both = [written(1, key="slow"), written(2), *handled(2)]
    slow = OpenKey(hashlib.blake2b(b"slow", digest_size=8).digest(), Position(1))
    assert complaints(NoLoss(), *both, commit(0, frontier=2, open_keys=(slow,))) == []
    assert complaints(NoLoss(), *both, commit(0, frontier=2, open_keys=(OpenKey(digest, Position(2)),)))


def test_handling_again_what_was_committed_is_found():
    repeat = CallStarted(call(1, token=2))
    assert complaints(FewDuplicates(), *TWO, *handled(1), repeat) == []
    assert "although it was committed" in complaints(FewDuplicates(), *TWO, *handled(1), commit(1), repeat)[0]


def test_handling_again_what_was_finished_before_a_clean_stop_is_found():
    def repeated(*, loses):
        journal = Journal([FewDuplicates()])
        journal.tell(CallStarted(call(1)))
        if loses:
            journal.tell(LeaseLossReported("a", "P"))
        journal.tell(CallFinished(call(1)))
        journal.tell(CleanStop(2, "a", 0))
        journal.tell(CallStarted(call(1, process="b", token=2)))
        return [violation.what for violation in journal.violations]

    assert repeated(loses=True) == []
    assert "a finished it before its clean stop" in repeated(loses=False)[0]


def owned(at_ms, process, *, token=1, stopped=None):
    row = LeaseRow(key=KEY, epoch=token, owner=f"{process}#1", stopped=stopped)
    return LeaseWrite(at_ms, row)


def repeated_after_a_crash(*between, finished_ms=1_000, died_ms=3_000, before=()):
    """What is said when "a" finishes a record and dies, and "b" handles it again; `between` happens meanwhile."""
    journal = Journal([FewDuplicates(commit_ms=1_500)])
    journal.tell(OwnerChanged(owned(0, "a"), "a"))
    for fact in before:
        journal.tell(fact)
    journal.tell(CallStarted(call(1)))
    journal.tell(CallFinished(replace(call(1), at_ms=finished_ms)))
    for fact in between:
        journal.tell(fact)
    journal.tell(ProcessDied(died_ms, "a"))
    journal.tell(OwnerChanged(owned(13_000, "b", token=2), "b"))
    journal.tell(CallStarted(replace(call(1, process="b", token=2), at_ms=14_000)))
    return [violation.what for violation in journal.violations]


def test_handling_again_what_should_have_been_committed_is_found():
    assert "a finished it at 1.000 s and could have committed it for 2000 ms" in repeated_after_a_crash()[0]
    assert repeated_after_a_crash(finished_ms=1_501) == []


def test_handling_again_what_was_finished_before_a_hand_off_is_found():
    given = LeaseCommitted(owned(1_200, "b", token=2))
    assert "a finished it before it gave the shard away" in repeated_after_a_crash(given)[0]


def test_the_time_in_which_a_process_cannot_commit_does_not_count():
    assert repeated_after_a_crash(CommitsBlocked("a", 1_400, 1_600)) == []
    assert repeated_after_a_crash(CommitsBlocked("b", 1_400, 1_600)) != []
    assert repeated_after_a_crash(CommitsBlocked("a", 2_600, 3_500)) != []  # it could before
    assert repeated_after_a_crash(CommitsBlocked("a", 0, 1_400)) != []  # and here, after


def test_what_finishes_after_the_lease_was_lost_is_not_to_be_committed():
    assert repeated_after_a_crash(MemberLeft(2_000, "a#1")) == []
    assert repeated_after_a_crash(MemberLeft(2_000, "a#2")) != []
    assert repeated_after_a_crash(OwnerChanged(owned(2_000, "nobody"), None)) == []
    assert repeated_after_a_crash(StoreWentBack()) == []
    assert repeated_after_a_crash(before=[OwnerChanged(owned(500, "c", token=7), "c")]) == []


def test_what_finishes_after_its_shard_was_stopped_is_not_to_be_committed():
    stopped = Stopped(
        reason=StoppedByCrashes(owner_count=5), position=None, partition_key=None, member_id="a#1", at_wall_ms=0
    )
    assert repeated_after_a_crash(LeaseCommitted(owned(2_000, "a", stopped=stopped))) == []
    assert repeated_after_a_crash(LeaseCommitted(owned(2_000, "a"))) != []


def test_what_lies_beyond_a_thousand_open_records_is_not_to_be_committed():
    def repeated(open_count):
        records = [call(number, key=f"key-{number}") for number in range(-open_count, 0)]
        return repeated_after_a_crash(before=[CallStarted(record) for record in records])

    assert repeated(1_001) == []
    assert repeated(1_000) != []


def test_a_shard_that_is_finished_before_its_children_have_rows_is_found():
    child = LeaseCreated(LeaseWrite(0, LeaseRow(key=LeaseKey("1:orders:1", 0, "C"))))
    end = commit(1, finish=Finish("end", ("C",)))
    assert complaints(ChildrenFirst(), child, end) == []
    assert "C has no row" in complaints(ChildrenFirst(), end)[0]


def test_an_owner_that_comes_back_after_the_next_one_is_found():
    first, second = CallStarted(call(1)), CallStarted(call(2, process="b", token=2))
    assert complaints(OneOwner(), first, second) == []
    assert "stale dispatch" in complaints(OneOwner(), first, second, CallStarted(call(3)))[0]


def test_a_call_that_was_paused_before_its_start_is_a_zombie_and_no_second_owner():
    journal = Journal([OneOwner()])
    for event in (call(1), call(2, process="b", token=2), call(3, was_paused=True)):
        journal.tell(CallStarted(event))
    assert journal.violations == []
    assert journal.zombies == 1


def overlap(checker, *between, at_ms=20_000, batch=0):
    """A call of process a runs while b takes the shard, and then starts the same record."""
    journal = Journal([checker])
    journal.tell(OwnerChanged(LeaseWrite(0, LeaseRow(key=KEY, owner="a#1", epoch=1)), "a"))
    journal.tell(CallStarted(call(1, batch=batch)))
    for fact in between:
        journal.tell(fact)
    journal.tell(OwnerChanged(LeaseWrite(at_ms, LeaseRow(key=KEY, owner="b#1", epoch=2)), "b"))
    journal.tell(CallStarted(replace(call(1, process="b", token=2), at_ms=at_ms)))
    return [violation.what for violation in journal.violations]


@pytest.mark.parametrize("checker", [NoOverlap, QuietTransfers])
def test_a_call_that_runs_while_another_owner_takes_its_shard_is_found(checker):
    assert "is running since" in overlap(checker())[0]
    assert overlap(checker(), CallFinished(call(1))) == []
    assert overlap(checker(), CallAbandoned(call(1))) == []
    assert overlap(checker(), ProcessDied(5, "a")) == []


@pytest.mark.parametrize("checker", [NoOverlap, QuietTransfers])
def test_a_call_that_was_reported_as_a_zombie_or_could_not_be_is_excused(checker):
    assert overlap(checker(), ZombieReported("a", "P", Position(1))) == []
    assert len(overlap(checker(), ZombieReported("a", "P", Position(2)))) == 1
    companion = call(2, batch=7)
    assert overlap(checker(), CallStarted(companion), ZombieReported("a", "P", Position(2)), batch=7) == []
    assert overlap(checker(), ProcessHalted("a", 15_000)) == []
    assert len(overlap(checker(), ProcessHalted("a", 10_000))) == 1
    assert overlap(checker(), StoreEmptied(("a",))) == []


def test_a_call_that_runs_when_its_member_gives_up_its_leases_is_found():
    assert "a#1 gives up its leases" in overlap(QuietTransfers(), MemberLeft(5, "a#1"), CallFinished(call(1)))[0]
    assert overlap(QuietTransfers(), MemberLeft(5, "c#1"), CallFinished(call(1))) == []


def test_tokens_that_go_back_or_are_shared_are_found():
    parent, child = CallStarted(call(1, token=3)), CallStarted(call(2, shard="C", token=1))
    assert "goes back" in complaints(OneOwner(), parent, child)[0]
    assert "one fence token" in complaints(OneOwner(), parent, CallStarted(call(2, process="b", token=3)))[0]


def test_after_a_store_went_back_tokens_may_repeat_but_owners_may_not_come_back():
    journal = Journal([OneOwner()])
    journal.tell(CallStarted(call(1)))
    journal.tell(StoreWentBack())
    journal.tell(CallStarted(call(2, process="b")))
    assert journal.violations == []
    journal.tell(CallStarted(call(3)))
    assert "stale dispatch" in journal.violations[0].what


def test_calls_after_the_store_was_emptied_are_not_checked():
    journal = Journal([OneOwner()])
    journal.tell(CallStarted(call(1)))
    journal.tell(StoreEmptied(("a",)))
    journal.tell(CallStarted(call(1, process="b")))
    journal.tell(CallStarted(call(2)))
    assert journal.violations == []
    assert journal.zombies == 1


def test_a_checkpoint_a_version_or_an_epoch_that_goes_back_is_found():
    first = commit(5, version=2, epoch=2)
    assert complaints(CheckpointAdvances(), first, commit(6, version=3, epoch=2)) == []
    for worse in (commit(4, version=3, epoch=2), commit(5, version=2, epoch=2), commit(6, version=3, epoch=1)):
        assert len(complaints(CheckpointAdvances(), first, worse)) == 1
    end = commit(5, version=3, epoch=2, finish=Finish("end"))
    assert "after its end" in complaints(CheckpointAdvances(), first, end, commit(5, version=4, epoch=2))[0]


def test_a_child_before_its_parents_end_is_found():
    family = [ShardOpened("C", ("P",)), *TWO, written(3, shard="C")]
    early = CallStarted(call(3, shard="C"))
    assert "of its parent P" in complaints(ParentsFirst(), *family, *handled(1), early)[0]
    assert complaints(ParentsFirst(), *family, *handled(1), *handled(2), early) == []


def test_bytes_over_the_budget_are_found():
    journal = Journal([WithinBudget()])
    journal.tell(BytesMeasured(1, "a", 10, 10, 10))
    assert journal.violations == []
    journal.tell(BytesMeasured(2, "a", 10, 11, 10))
    assert "held 11, of 10" in journal.violations[0].what
    journal.tell(CleanStop(3, "a", 0))
    journal.tell(CleanStop(4, "b", 5))
    assert "5 bytes are not given back" in journal.violations[1].what


def test_bytes_that_are_received_before_the_budget_counts_them_are_found():
    journal = Journal([WithinBudget()])
    journal.tell(BytesReceived(1, "a", 10, 10))
    assert journal.violations == []
    journal.tell(BytesReceived(2, "a", 11, 10))
    assert "receives 11 bytes, and its budget counts 10" in journal.violations[0].what


def test_unfinished_records_are_found():
    assert complaints(NoStandstill(), *TWO, *handled(1), *handled(2)) == []
    assert "1 records were never finished" in complaints(NoStandstill(), *TWO, *handled(1))[0]


def test_unseen_errors_are_violations_until_the_run_is_torn_down():
    journal = Journal(all_checkers())
    journal.tell(UnseenError(5, "task died"))
    journal.is_closed = True
    journal.tell(UnseenError(6, "cancelled"))
    journal.tell(CallStarted(call(1)))
    assert [str(violation) for violation in journal.violations] == ["at 0.005 s: no silent failures: task died"]


@pytest.mark.parametrize("checker", all_checkers())
def test_a_clean_run_satisfies_every_checker(checker):
    events = [*TWO, *handled(1), commit(1), *handled(2), commit(2, version=2)]
    assert complaints(checker, *events) == []


def test_success_is_false_while_a_shard_that_the_process_holds_is_stopped():
    reason = StoppedByHandler(position="4", partition_key="k", attempts=1, error="no such customer")

    def outcome(*, stopped, owner="a"):
        stop = Stopped(reason=reason, position=Position(4), partition_key="k", member_id="m", at_wall_ms=0)
        checker = NoFalseSuccess()
        journal = Journal([checker])
        row = replace(commit(3).write.row, stopped=stop)
        journal.tell(OwnerChanged(LeaseWrite(0, row), owner))
        journal.tell(LeaseCommitted(LeaseWrite(0, row)))
        if not stopped:
            journal.tell(commit(4))
        journal.tell(SuccessReported(7, "a"))
        return [violation.what for violation in journal.violations]

    assert outcome(stopped=False) == []
    assert outcome(stopped=True, owner="b") == []
    assert outcome(stopped=True) == [f"a ended by itself and reported success, but P is {reason}"]


def letter(position, key, at_ms=5):
    return LetterWritten(at_ms, "a", StreamRecord("shard", position, "key"), key)


def test_a_dead_lettered_record_has_one_letter_and_no_more_calls():
    checker = OneOutcome()
    call = RecordCall(9, "b", "shard", Position(1), "key", 1)
    for fact in (letter(Position(1), "one"), letter(Position(1), "one"), letter(Position(2), "two")):
        checker.tell(fact)
    assert checker.violations == []
    checker.tell(letter(Position(1), "other"))
    checker.tell(letter(Position(3), "two"))
    checker.tell(CallStarted(call))
    assert [violation.what.split(" of ")[0] for violation in checker.violations[:2]] == [
        "a writes a second letter", "a writes a letter",
    ]  # fmt: skip
    assert "starts although its record is in the dead letters" in checker.violations[2].what
    checker.tell(StoreWentBack())
    checker.tell(CallStarted(call))
    assert len(checker.violations) == 3


def test_committed_attempts_count_under_every_owner():
    checker = AttemptsSurvive()
    opened = OpenKey(b"12345678", Position(1), 2)
    row = LeaseRow(key=LeaseKey("1:orders:1", 0, "shard"), checkpoint=Checkpoint(open_keys=(opened,)))
    checker.tell(LeaseCommitted(LeaseWrite(1, row)))
    call = RecordCall(9, "b", "shard", Position(1), "key", 1, attempt=3)
    checker.tell(CallStarted(call))
    assert checker.violations == []
    checker.tell(CallStarted(replace(call, attempt=1)))
    assert "is attempt 1, but 2 failed ones were committed" in checker.violations[0].what
    checker.tell(CallStarted(replace(call, attempt=1, batch=4)))  # of a batch, only single records count
    assert len(checker.violations) == 1
