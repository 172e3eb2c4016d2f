from msgspec.structs import replace

from anabranch._core.leases.lease_table import LeaseTable
from anabranch._core.leases.members import FailureDetector
from anabranch._core.leases.plan import (
    TakeLease,
    Write,
    apply_members,
    apply_seal,
    apply_take,
    apply_write,
)
from anabranch._core.leases.store_calls import NoAnswer
from anabranch._core.leases.timing import lease_timing
from anabranch._model.leases import Conflict, HandOffRequest, LeaseKey, LeaseRow, MemberRow

KEY = LeaseKey("1:orders:1", 0, "shardId-000000000000")
FREE = LeaseRow(key=KEY, version=3, epoch=1)
MINE = replace(FREE, owner="me#1", version=4, epoch=2)
TAKE = TakeLease(KEY, "me#1", None, 3)
WRITE = Write(MINE, 4)
OTHER = MemberRow(member_id="b#1", expiry_ms=10_000, counter=1)


def table(*rows):
    made = LeaseTable("me#1", 10_000)
    made.observe_leases(rows, 0)
    made.changed = False
    return made


def test_a_take_that_succeeded_is_held():
    known = table(FREE)
    apply_take(known, TAKE, MINE, 1)
    assert known.held[KEY].row is MINE


def test_a_take_that_lost_the_race_is_known():
    known = table(FREE)
    apply_take(known, TAKE, Conflict(replace(MINE, owner="b#1")), 1)
    assert not known.held
    assert known.leases[KEY].owner == "b#1"


def test_a_conflict_with_an_own_earlier_take_is_adopted():
    known = table(FREE)
    apply_take(known, TAKE, Conflict(MINE), 1)
    assert known.held[KEY].row is MINE


def test_the_answer_of_a_take_that_was_adopted_meanwhile_disturbs_nothing():
    known = table(FREE)
    known.observe_lease(MINE, 1)
    holding = known.held[KEY]
    apply_take(known, TAKE, MINE, 2)
    assert known.held[KEY] is holding


def test_a_take_without_an_answer_is_looked_for():
    known = table(FREE)
    apply_take(known, TAKE, NoAnswer("away"), 1)
    known.observe_leases([FREE], 2)
    assert known.leases_to_read(3) == [KEY]


def test_a_lease_that_vanished_is_read_again():
    known = table(FREE)
    apply_take(known, TAKE, Conflict(None), 1)
    assert known.wants_all_leases(2)


def test_an_answer_older_than_what_was_seen_proves_that_the_store_went_back():
    known = table(FREE)
    apply_take(known, TAKE, Conflict(replace(FREE, version=2)), 1)
    assert known.rolled_back


def test_a_write_moves_the_version():
    known = table(MINE)
    assert apply_write(known, WRITE, replace(MINE, version=5), 1) == "written"
    assert known.held[KEY].row.version == 5


def test_a_gift_ends_the_holding():
    known = table(MINE)
    assert apply_write(known, WRITE, replace(MINE, owner="b#1", version=5), 1) == "written"
    assert not known.held


def test_a_write_without_an_answer_leaves_all_as_it_is():
    known = table(MINE)
    assert apply_write(known, WRITE, NoAnswer("away"), 1) == "unknown"
    assert known.held[KEY].row is MINE


def test_a_conflict_with_an_own_earlier_write_may_be_repeated():
    known = table(MINE)
    assert apply_write(known, WRITE, Conflict(replace(MINE, version=5)), 1) == "again"
    assert known.held[KEY].row.version == 5


def test_a_conflict_with_another_owner_is_a_loss():
    known = table(MINE)
    assert apply_write(known, WRITE, Conflict(replace(MINE, owner="b#1", version=6, epoch=3)), 1) == "lost"
    assert not known.held


def test_a_held_lease_that_vanished_or_grew_younger_proves_that_the_store_went_back():
    for row in (None, replace(MINE, version=2)):
        known = table(MINE)
        assert apply_write(known, WRITE, Conflict(row), 1) == "lost"
        assert known.rolled_back
        assert not known.held


def test_a_gift_that_a_store_refuses_which_went_back_is_a_loss():
    known = table(MINE)
    known.drain(HandOffRequest(KEY, "b#1"))
    holding, gift = known.held[KEY], known.transfer(KEY, known.held[KEY].row)
    assert apply_write(known, Write(gift, MINE.version), Conflict(replace(MINE, version=2)), 1) == "lost"
    assert holding.pending_transfer is None
    assert not known.held


def test_a_write_of_what_is_not_held_any_more_is_lost():
    assert apply_write(table(FREE), WRITE, replace(MINE, version=5), 1) == "lost"


def test_a_member_that_ended_makes_the_leases_worth_reading():
    for end in ([replace(OTHER, state="left")], []):
        known, detector = table(MINE), FailureDetector(lease_timing())
        apply_members(known, detector, [OTHER], 1)
        assert not known.wants_all_leases(1)
        apply_members(known, detector, end, 2)
        assert known.wants_all_leases(2)


def test_news_of_members_are_a_reason_to_plan():
    known, detector = table(MINE), FailureDetector(lease_timing())
    apply_members(known, detector, [OTHER], 1)
    assert known.changed
    known.changed = False
    apply_members(known, detector, [replace(OTHER, counter=2)], 4)
    assert not known.changed


def test_a_seal_that_succeeded_is_news_and_one_without_an_answer_is_not():
    known, detector = table(MINE), FailureDetector(lease_timing())
    detector.observe([OTHER], 0)
    apply_seal(known, detector, None, 1)
    apply_seal(known, detector, OTHER, 1)
    assert not known.changed
    apply_seal(known, detector, replace(OTHER, state="sealed"), 1)
    assert known.changed
    assert detector.has_ended("b#1", 1)
