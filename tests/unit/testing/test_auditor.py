"""The auditor sees what it should, and nothing else."""

import pytest
from msgspec.structs import replace

from anabranch._model.leases import Checkpoint, Finish, LeaseKey, LeaseRow
from anabranch._model.streams import Position
from anabranch.testing import Auditor
from shard_records import SHARD, make_record


@pytest.fixture
def auditor():
    return Auditor()


def handle(auditor, *numbers, token=1, key="a"):
    for number in numbers:
        auditor.start(make_record(number, key), token)
        auditor.finish(make_record(number, key), token)


def row(watermark, **fields):
    checkpoint = Checkpoint(Position(watermark, -1), **fields.pop("checkpoint", {}))
    return LeaseRow(key=LeaseKey("1:orders:1", 0, SHARD), checkpoint=checkpoint, **fields)


def test_a_run_in_order_without_gaps_is_ok(auditor):
    for number in (1, 2, 3):
        auditor.wrote(make_record(number))
    handle(auditor, 1, 2, 3)
    report = auditor.report()
    assert report.ok
    assert (report.written_count, report.started_count, report.finished_count, report.repeated_count) == (3, 3, 3, 0)


def test_what_was_written_and_never_finished_is_lost(auditor):
    for number in (1, 2):
        auditor.wrote(make_record(number))
    handle(auditor, 1)
    auditor.start(make_record(2), 1)
    report = auditor.report()
    assert not report.ok
    assert report.lost_count == 1
    assert "lost: 'a' at 2" in str(report)


def test_a_handled_record_that_was_never_written_is_unexpected_once_writes_are_recorded(auditor):
    handle(auditor, 1)
    assert auditor.report().ok
    auditor.wrote(make_record(2))
    handle(auditor, 2)
    assert auditor.report().unexpected_count == 1


def test_a_record_that_is_first_started_after_a_later_one_breaks_the_order(auditor):
    handle(auditor, 2, token=1)
    handle(auditor, 1, token=2)
    assert auditor.report().order_break_count == 1
    assert "first started after" in str(auditor.report())


def test_a_record_that_is_first_started_before_the_one_before_it_was_finished_breaks_the_order(auditor):
    auditor.start(make_record(1), 1)
    handle(auditor, 2, token=2)
    assert "was finished" in str(auditor.report())


def test_one_holding_starts_one_record_of_a_key_at_a_time(auditor):
    auditor.start(make_record(1), 1)
    auditor.start(make_record(2), 1)
    auditor.start(make_record(3, "b"), 1)
    assert auditor.report().order_break_count == 1
    assert "started while" in str(auditor.report())


def test_one_holding_never_goes_back(auditor):
    handle(auditor, 1, 2, 1)
    assert "by the same owner" in str(auditor.report())


def test_an_attempt_that_is_made_again_is_no_break(auditor):
    auditor.start(make_record(1), 1)
    handle(auditor, 1, 2)
    assert auditor.report().ok


def test_the_next_holding_may_repeat_what_was_not_committed(auditor):
    handle(auditor, 1, 2, 3)
    auditor.commit(row(1))
    handle(auditor, 2, 3, 4, token=2)
    report = auditor.report()
    assert report.ok
    assert report.repeated_count == 2


@pytest.mark.parametrize(
    "committed", [row(2), row(1, checkpoint={"frontier": Position(3, -1)}), row(2, finish=Finish("end"))]
)
def test_a_repeat_of_what_was_committed_is_a_finding(auditor, committed):
    handle(auditor, 1, 2, 3)
    auditor.commit(committed)
    handle(auditor, 2, token=2)
    assert auditor.report().committed_repeat_count == 1
    assert "repeated after its commit" in str(auditor.report())


def test_a_commit_covers_no_record_of_another_stream_with_the_same_shard_id(auditor):
    record = replace(make_record(1), stream="payments")
    for token in (1, 2):
        auditor.start(record, token)
        auditor.finish(record, token)
        auditor.commit(row(1))
    report = auditor.report()
    assert (report.repeated_count, report.committed_repeat_count) == (1, 0)


def test_effects_of_a_call_that_outlived_its_lease_count_apart_and_finish_nothing(auditor):
    auditor.wrote(make_record(1))
    auditor.start(make_record(1), 1)
    auditor.start(make_record(1), 2)
    auditor.finish(make_record(1), 1)
    auditor.start(make_record(1), 1)
    report = auditor.report()
    assert (report.zombie_count, report.started_count, report.lost_count) == (2, 2, 1)


def test_outstanding_records_can_be_awaited_whichever_side_reports_first(auditor):
    for number in (1, 1, 2):
        auditor.wrote(make_record(number))
    assert auditor.outstanding_count == 2
    handle(auditor, 1, 2, 3)
    handle(auditor, 1, token=2)
    auditor.wrote(make_record(3))
    assert auditor.outstanding_count == 0


def test_of_many_findings_all_are_counted_and_a_few_are_named(auditor):
    for number in range(100):
        auditor.wrote(make_record(number))
    assert auditor.report().lost_count == 100
    assert len(auditor.report().findings) == 20
