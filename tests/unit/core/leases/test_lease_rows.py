"""What each condition of a lease store means."""

from msgspec.structs import replace

from anabranch._core.leases import rows
from anabranch._model.leases import (
    AppRow,
    Conflict,
    ControlRow,
    Finish,
    HandOffRequest,
    HeartbeatWrite,
    LeaseKey,
    LeaseRow,
    MemberRow,
    StreamRow,
)
from anabranch._model.streams import TRIM_HORIZON

KEY = LeaseKey("1:orders:1", 0, "shardId-000000000000")
MEMBER = MemberRow(member_id="a#1", counter=3, expiry_ms=10_000)
SEALED = replace(MEMBER, state="sealed")
LEFT = replace(MEMBER, state="left")
REQUEST = HandOffRequest(KEY, "b#1").short_name
LEASE = LeaseRow(key=KEY, owner="a#1", version=7, epoch=2, takes_without_progress=1)


def take(row, **overrides):
    expected = {"expected_owner": "a#1", "expected_version": 7} | overrides
    return rows.take_lease(row, "b#1", **expected)


def test_a_heartbeat_raises_the_counter_and_reports():
    beat = HeartbeatWrite(member_id="a#1", attempt=5, load=2, change_count=9, reads_healthy=False, draining=True)
    row = rows.heartbeat(MEMBER, beat)
    assert row == replace(MEMBER, counter=5, load=2, change_count=9, reads_healthy=False, draining=True)


def test_a_heartbeat_removes_the_requests_it_answered_and_keeps_the_others():
    other = HandOffRequest(KEY, "c#1").short_name
    row = rows.heartbeat(
        replace(MEMBER, wanted=(REQUEST, other)), HeartbeatWrite(member_id="a#1", attempt=4, answered=(REQUEST,))
    )
    assert row.wanted == (other,)


def test_a_late_heartbeat_changes_nothing():
    assert rows.heartbeat(MEMBER, HeartbeatWrite(member_id="a#1", attempt=3, load=9)) is MEMBER


def test_a_heartbeat_is_never_an_upsert_and_revives_no_member():
    assert rows.heartbeat(None, HeartbeatWrite(member_id="a#1", attempt=9)) is None
    for gone in (SEALED, LEFT):
        assert rows.heartbeat(gone, HeartbeatWrite(member_id="a#1", attempt=9)) is gone


def test_a_seal_needs_the_counter_that_was_watched():
    assert rows.seal_member(MEMBER, 3) == SEALED
    assert rows.seal_member(MEMBER, 2) is MEMBER
    assert rows.seal_member(LEFT, 3) is LEFT
    assert rows.seal_member(None, 3) is None


def test_leaving_is_for_live_members():
    assert rows.leave(MEMBER) == LEFT
    assert rows.leave(SEALED) is SEALED
    assert rows.leave(None) is None


def test_a_request_is_written_once_and_to_live_donors_only():
    asked = rows.request_hand_off(MEMBER, REQUEST)
    assert asked.wanted == (REQUEST,)
    assert rows.request_hand_off(asked, REQUEST) is asked
    assert rows.request_hand_off(SEALED, REQUEST) is SEALED
    assert rows.request_hand_off(None, REQUEST) is None


def test_a_take_writes_the_new_owner():
    taken = replace(LEASE, owner="b#1", version=8, epoch=3, takes_without_progress=2)
    assert take(LEASE) == taken
    assert take(replace(LEASE, owner=None), expected_owner=None) == taken


def test_a_take_needs_the_owner_and_version_that_were_seen():
    assert take(LEASE, expected_version=6) == Conflict(LEASE)
    assert take(LEASE, expected_owner=None) == Conflict(LEASE)
    assert take(None) == Conflict(None)


def test_a_finished_lease_cannot_be_taken():
    finished = replace(LEASE, finish=Finish("end"))
    assert take(finished) == Conflict(finished)


def test_a_take_raises_the_epoch_above_the_parents():
    assert take(LEASE, epoch_floor=40).epoch == 41


def test_only_the_owner_at_the_right_version_writes_a_lease():
    given = replace(LEASE, owner="b#1")
    assert rows.write_lease(LEASE, given, member_id="a#1", expected_version=7) == replace(given, version=8)
    assert rows.write_lease(LEASE, given, member_id="b#1", expected_version=7) == Conflict(LEASE)
    assert rows.write_lease(LEASE, given, member_id="a#1", expected_version=6) == Conflict(LEASE)
    assert rows.write_lease(None, given, member_id="a#1", expected_version=7) == Conflict(None)


def test_deletes_are_for_what_is_over():
    assert rows.may_delete_lease(replace(LEASE, finish=Finish("end")), 7)
    assert not rows.may_delete_lease(replace(LEASE, finish=Finish("end")), 6)
    assert not rows.may_delete_lease(LEASE, 7)
    assert not rows.may_delete_lease(None, 7)
    assert rows.may_delete_member(SEALED)
    assert rows.may_delete_member(LEFT)
    assert not rows.may_delete_member(MEMBER)
    assert not rows.may_delete_member(None)


def test_a_stream_is_replaced_at_its_version_only():
    stream = StreamRow(stream_key="k", name="orders", arn="", created_seconds=0.0, origin=TRIM_HORIZON, version=4)
    ready = replace(stream, bootstrapped=True)
    assert rows.write_stream(stream, ready, 4) == replace(ready, version=5)
    assert rows.write_stream(stream, ready, 3) is None
    assert rows.write_stream(None, ready, 4) is None


def test_a_command_ends_once():
    pending = ControlRow(command_id="1", action="pause")
    applied = replace(pending, state="applied")
    assert rows.write_control(pending, applied) == applied
    assert rows.write_control(applied, replace(pending, state="refused")) is None
    assert rows.write_control(None, applied) is None


def test_the_trusted_storage_is_changed_only_from_the_one_that_was_seen():
    app = AppRow(app="billing", app_id="1", created_wall_ms=0, incarnation="x")
    assert rows.record_incarnation(app, "1", "x", "y").incarnation == "y"
    assert rows.record_incarnation(app, "2", "x", "y") is app
    assert rows.record_incarnation(app, "1", "w", "y") is app
    assert rows.record_incarnation(None, "1", "x", "y") is None


def test_an_application_goes_only_under_its_own_id():
    app = AppRow(app="billing", app_id="1", created_wall_ms=0)
    assert rows.may_delete_app(app, "1")
    assert not rows.may_delete_app(app, "2")
    assert not rows.may_delete_app(None, "1")


def test_a_viewer_raises_the_watch_of_its_application():
    app = AppRow(app="billing", app_id="1", created_wall_ms=0, watch=4)
    assert rows.renew_watch(app, "1").watch == 5
    assert rows.renew_watch(app, "2") is app
    assert rows.renew_watch(None, "1") is None


def test_a_donor_has_at_most_eight_open_requests():
    row = MEMBER
    for number in range(9):
        row = rows.request_hand_off(row, f"request {number}")
    assert row.wanted == tuple(f"request {number}" for number in range(8))
    answered = HeartbeatWrite(member_id="a#1", attempt=9, answered=row.wanted[:1])
    row = rows.request_hand_off(rows.heartbeat(row, answered), REQUEST)
    assert row.wanted[-1] == REQUEST
