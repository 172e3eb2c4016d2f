from msgspec.structs import replace

from anabranch._core.leases.lease_table import LEASES_READ_INTERVAL_MS, LeaseTable, weight
from anabranch._model.leases import Finish, HandOffRequest, LeaseKey, LeaseRow, Stopped

P, Q = (LeaseKey("1:orders:1", 0, f"shardId-{number:012}") for number in range(2))
MINE = LeaseRow(key=P, owner="me#1", version=3, epoch=1)
REQUEST = HandOffRequest(P, "b#1")


def table(*rows):
    made = LeaseTable("me#1", 10_000)
    made.observe_leases(rows, 0)
    made.changed = False
    return made


def test_a_row_that_names_this_member_is_adopted():
    assert table(MINE).is_startable(P)


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
    assert not known.is_startable(P)
    assert known.changed


def test_an_own_write_that_shows_up_late_is_adopted():
    known = table(MINE)
    known.observe_lease(replace(MINE, version=4), 1_000)
    assert known.held[P].row.version == 4
    assert not known.changed


def test_a_lease_that_went_away_and_came_back_is_another_holding():
    known = table(MINE)
    known.drain(REQUEST)
    known.transfer(P)
    known.observe_lease(replace(MINE, version=5, epoch=3), 1_000)
    assert known.held[P].state == "held"
    assert known.held[P].pending_transfer is None
    assert not known.is_unanswered(REQUEST)


def test_a_lease_in_transfer_is_never_started_again():
    known = table(MINE)
    known.drain(REQUEST)
    assert not known.is_startable(P)
    gift = known.transfer(P)
    assert (gift.owner, gift.epoch) == ("b#1", 2)
    known.observe_lease(replace(MINE, version=4), 1_000)
    known.keep(P, 1_000)
    assert not known.is_startable(P)
    assert known.held[P].pending_transfer is gift


def test_a_release_names_nobody_and_leaves_the_epoch():
    released = table(MINE).transfer(P, replace(MINE, records_handled=7))
    assert (released.owner, released.epoch, released.records_handled) == (None, 1, 7)


def test_a_drain_that_takes_too_long_keeps_the_lease_and_answers():
    known = table(MINE)
    known.drain(REQUEST)
    assert not known.is_unanswered(REQUEST)
    known.keep(P, 1_000)
    assert known.is_startable(P)
    assert list(known.answered) == [REQUEST]


def test_a_lease_that_was_drained_for_nobody_can_be_kept():
    known = table(MINE)
    known.held[P].state = "draining"
    known.keep(P, 1_000)
    assert known.is_startable(P)
    assert not known.answered


def test_the_set_of_held_leases_has_a_version():
    known = table(MINE)
    before = known.lease_version
    known.acknowledge(replace(MINE, version=4))
    assert known.lease_version == before
    known.acknowledge(replace(MINE, version=5, finish=Finish("end")))
    assert known.lease_version == before + 1
    assert not known.held


def test_a_new_member_holds_nothing_and_reads_again():
    known = table(MINE)
    known.become("me#2")
    assert not known.held
    assert known.wants_leases(1)
    assert known.changed


def test_rows_that_are_listed_no_more_are_forgotten_but_not_what_is_held_or_known_to_be_finished():
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
    assert not known.wants_leases(LEASES_READ_INTERVAL_MS - 1)
    assert known.wants_leases(LEASES_READ_INTERVAL_MS)
    known.read_again()
    assert known.wants_leases(1)
    assert LeaseTable("me#1", 10_000).wants_leases(0)


def test_leases_are_read_while_an_answer_is_missing():
    known = table(MINE)
    known.doubt(0)
    known.observe_leases([MINE], 1)
    assert known.wants_leases(19_999)
    assert not known.wants_leases(20_000)
    known.asked[Q] = 0
    assert known.wants_leases(20_000)


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


def test_shards_that_stand_still_on_purpose_weigh_nothing():
    stopped = replace(MINE, stopped=Stopped("poison", None, None, "me#1", 0))
    assert weight(stopped) == weight(replace(MINE, paused=True)) == 0
    assert table(MINE).load == 1
    assert table(stopped).load == 0


def test_a_pause_is_a_change_for_the_plan():
    known = table(MINE)
    known.observe_lease(replace(MINE, version=4, paused=True), 1_000)
    assert known.changed


def test_leases_of_streams_that_this_member_does_not_read_are_none_of_its_business():
    known = table()
    known.streams = ("another stream",)
    known.observe_leases([MINE], 0)
    assert not known.leases
    assert not known.held


def test_a_stopped_shard_is_tried_again_by_who_found_it_so_when_it_came():
    stopped = Stopped(reason="a record", position=None, partition_key=None, member_id="b#1", at_wall_ms=9_999_999)
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
