import pytest
from msgspec.structs import replace

from anabranch._core.leases.lease_table import FINISHED_KEPT_MS, LEASES_READ_INTERVAL_MS, LeaseTable, weight
from anabranch._model.leases import Finish, HandOffRequest, LeaseKey, LeaseRow, MemberRow, Stopped
from anabranch.reasons import StoppedByCrashes

P, Q = (LeaseKey("1:orders:1", 0, f"shardId-{number:012}") for number in range(2))
MINE = LeaseRow(key=P, owner="me#1", version=3, epoch=1)
REQUEST = HandOffRequest(P, "b#1")


def table(*rows):
    made = LeaseTable("me#1", 10_000)
    made.observe_leases(rows, 0)
    made.changed = False
    return made


def test_a_row_that_names_this_member_is_adopted():
    assert table(MINE).held[P].state == "held"


def test_a_finished_row_that_names_this_member_is_not_adopted():
    assert not table(replace(MINE, finish=Finish("end"))).held


def test_an_older_row_in_a_later_answer_is_ignored():
    known = table(MINE)
    known.acknowledge(replace(MINE, owner="b#1", version=4, epoch=2))
    known.observe_leases([MINE], 1_000)
    assert not known.held
    assert known.leases[P].version == 4


def test_a_lost_lease_is_dropped():
    known = table(MINE)
    known.observe_lease(replace(MINE, owner="b#1", version=4, epoch=2), 1_000)
    assert P not in known.held
    assert known.changed


def test_an_own_write_that_shows_up_late_is_adopted():
    known = table(MINE)
    known.observe_lease(replace(MINE, version=4), 1_000)
    assert known.held[P].row.version == 4
    assert not known.changed


def test_a_lease_that_went_away_and_came_back_is_another_holding():
    known = table(MINE)
    known.drain(REQUEST)
    known.transfer(P, known.held[P].row)
    known.observe_lease(replace(MINE, version=5, epoch=3), 1_000)
    assert known.held[P].state == "held"
    assert known.held[P].pending_transfer is None
    assert not known.unanswered([REQUEST.short_name])


def test_a_lease_in_transfer_is_never_started_again():
    known = table(MINE)
    known.drain(REQUEST)
    assert known.held[P].state != "held"
    gift = known.transfer(P, known.held[P].row)
    assert (gift.owner, gift.epoch) == ("b#1", 2)
    known.observe_lease(replace(MINE, version=4), 1_000)
    known.keep(P, 1_000)
    assert known.held[P].state != "held"
    assert known.held[P].pending_transfer is gift


def test_a_release_names_no_owner_and_leaves_the_epoch():
    released = table(MINE).transfer(P, replace(MINE, records_handled=7))
    assert (released.owner, released.epoch, released.records_handled) == (None, 1, 7)


def test_a_drain_that_takes_too_long_keeps_the_lease_and_answers():
    known = table(MINE)
    known.drain(REQUEST)
    assert not known.unanswered([REQUEST.short_name])
    known.keep(P, 1_000)
    assert known.held[P].state == "held"
    assert list(known.answered) == [REQUEST.short_name]


def test_a_lease_that_was_drained_for_no_member_can_be_kept():
    known = table(MINE)
    known.held[P].state = "draining"
    known.keep(P, 1_000)
    assert known.held[P].state == "held"
    assert not known.answered


def test_changes_of_leases_are_numbered_and_named_but_commits_are_not():
    known = table(MINE)
    before = known.change_count
    known.acknowledge(replace(MINE, version=4))
    assert known.change_count == before
    known.acknowledge(replace(MINE, version=5, finish=Finish("end")))
    assert known.change_count == before + 1
    assert known.changed_last[-1] == P.short_name
    assert not known.held


def test_a_new_member_holds_nothing_and_reads_again():
    known = table(MINE)
    known.become("me#2")
    assert not known.held
    assert known.wants_all_leases(1)
    assert known.changed


def test_rows_that_are_no_longer_listed_are_forgotten_unless_held_or_finished():
    known = table(MINE, LeaseRow(key=Q, owner="b#1", version=1))
    known.asked[Q] = 0
    known.observe_leases([], 1_000)
    assert list(known.leases) == [P]
    assert not known.asked
    known.acknowledge(replace(MINE, version=4, finish=Finish("end")))
    known.observe_leases([], 2_000)
    known.observe_leases([MINE], 3_000)
    assert not known.held


def test_leases_are_read_when_there_is_reason_and_once_a_minute():
    known = table(MINE)
    assert not known.wants_all_leases(LEASES_READ_INTERVAL_MS - 1)
    assert known.wants_all_leases(LEASES_READ_INTERVAL_MS)
    known.read_again()
    assert known.wants_all_leases(1)
    assert LeaseTable("me#1", 10_000).wants_all_leases(0)


def test_a_lease_is_read_while_the_answer_to_its_take_is_missing():
    known = table(MINE)
    known.expect_late_take(Q, 0)
    known.observe_leases([MINE], 1)
    assert not known.wants_all_leases(19_999)
    assert known.leases_to_read(19_999) == [Q]
    assert known.leases_to_read(20_000) == []


KEYS = [LeaseKey(P.stream_key, 0, f"shardId-{number:012d}") for number in range(20)]


def other(change_count, *keys, member_id="b#1"):
    names = tuple(key.short_name for key in keys)
    return MemberRow(member_id=member_id, expiry_ms=1, change_count=change_count, changed=names)


def test_what_another_member_names_is_read_and_once_only():
    known = table(MINE)
    known.observe_changes(other(1, KEYS[1]))
    known.observe_changes(other(3, KEYS[1], KEYS[2], KEYS[3]))
    assert not known.wants_all_leases(1)
    assert known.leases_to_read(1) == KEYS[1:4]
    for key in KEYS[1:4]:
        known.observe_read(key, LeaseRow(key=key), 1)
    known.observe_changes(other(3, KEYS[1], KEYS[2], KEYS[3]))
    assert known.leases_to_read(2) == []
    assert list(known.leases) == [P, *KEYS[1:4]]


def test_a_lease_that_could_not_be_read_is_read_later():
    known = table(MINE)
    known.observe_changes(other(1, KEYS[1]))
    assert known.leases_to_read(1) == known.leases_to_read(2) == [KEYS[1]]


@pytest.mark.parametrize(
    "rows",
    [
        [other(9, *KEYS[:8])],
        [other(1, KEYS[0]), other(10, *KEYS[2:10])],
        [other(5, *KEYS[:5]), other(4, *KEYS[5:9], member_id="c#1")],
        [other(1, LeaseKey("a stream that nobody here reads", 0, KEYS[0].shard_id))],
        [other(1, LeaseKey(P.stream_key, 0, "not a usual name"))],
        [other(2, KEYS[0])],
    ],
    ids=["a first look", "a gap", "many members", "unknown stream", "unusual name", "fewer names than changes"],
)
def test_all_leases_are_read_if_more_changed_than_is_named_or_than_is_cheap(rows):
    known = table(MINE)
    for row in rows:
        known.observe_changes(row)
    assert known.wants_all_leases(1)
    known.observe_leases([MINE], 2)
    assert not known.wants_all_leases(3)
    assert known.leases_to_read(3) == []


def test_what_this_member_changed_itself_is_not_read():
    known = table(MINE)
    known.observe_changes(other(9, *KEYS[:8], member_id="me#1"))
    assert not known.wants_all_leases(1)


def test_a_known_lease_that_is_gone_makes_all_leases_worth_reading():
    known = table(MINE)
    known.observe_read(KEYS[1], None, 1)
    assert not known.wants_all_leases(1)
    known.observe_read(P, None, 1)
    assert known.wants_all_leases(1)


def test_a_finished_lease_is_forgotten_after_a_while():
    known = table(replace(MINE, owner=None, finish=Finish("end")))
    known.observe_leases([], 0)
    known.observe_leases([], FINISHED_KEPT_MS)
    assert list(known.leases) == [P]
    known.observe_leases([], FINISHED_KEPT_MS + 1)
    assert not known.leases


def test_changes_of_owner_are_remembered_with_the_one_before():
    known = table(LeaseRow(key=Q, owner=None, version=0))
    known.asked[Q] = 0
    known.observe_lease(LeaseRow(key=Q, owner="a#1", version=1), 10)
    assert not known.asked
    assert Q not in known.moved
    known.observe_lease(LeaseRow(key=Q, owner="b#1", version=2), 20)
    assert known.moved[Q] == (20, "a#1")


def test_a_store_that_went_back_in_time_is_forgotten_but_for_its_epochs():
    known = table(MINE)
    known.forget()
    assert not known.leases
    assert known.epoch_floors == {P: 1}
    known.observe_leases([replace(MINE, epoch=0)], 1_000)
    known.forget()
    assert known.epoch_floors == {P: 1}


def test_stopped_and_paused_shards_weigh_nothing():
    stopped = replace(MINE, stopped=Stopped(StoppedByCrashes(owner_count=5), None, None, "me#1", 0))
    assert weight(stopped) == weight(replace(MINE, paused=True)) == 0
    assert table(MINE).load == 1
    assert table(stopped).load == 0


def test_a_pause_is_a_change_for_the_plan():
    known = table(MINE)
    known.observe_lease(replace(MINE, version=4, paused=True), 1_000)
    assert known.changed


def test_leases_of_streams_that_this_member_does_not_read_are_known_and_never_held():
    known = table()
    known.streams = ("another stream",)
    known.observe_leases([MINE], 0)
    assert list(known.leases) == [P]
    assert not known.held


def test_a_stopped_shard_is_tried_again_by_a_member_that_found_it_stopped_when_it_joined():
    stopped = Stopped(
        reason=StoppedByCrashes(owner_count=5), position=None, partition_key=None, member_id="b#1", at_wall_ms=9_999_999
    )
    found, moving = replace(MINE, stopped=stopped), replace(MINE, key=Q)
    known = table(found, moving)
    assert known.tries_again(found)
    assert known.tries_again(moving)
    known.observe_leases([replace(found, version=4), replace(moving, version=4, stopped=stopped)], 1_000)
    assert known.tries_again(replace(found, version=4))
    assert not known.tries_again(replace(moving, version=4, stopped=stopped)), "it was there when that one stopped"
    assert not known.tries_again(replace(found, stopped=replace(stopped, member_id="me#1"))), "it has tried"


def test_of_a_lease_that_is_gone_nothing_is_kept():
    known = table(replace(MINE, owner="b#1"))
    known.not_wanted_until[P] = known.asked[P] = 300_000
    known.moved[P] = (0, "b#1")
    known.observe_leases([], 1_000)
    assert [known.leases, known.not_wanted_until, known.asked, known.moved] == [{}, {}, {}, {}]
