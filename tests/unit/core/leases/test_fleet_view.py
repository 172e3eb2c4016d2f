"""The status of a fleet from its rows."""

import pytest
from msgspec.structs import replace

from anabranch._core.leases.status import FleetObserver, FleetRows
from anabranch._model.leases import (
    AppRow,
    Checkpoint,
    Finish,
    LeaseKey,
    LeaseRow,
    MemberRow,
    ShardStatus,
    StatusRow,
    Stopped,
    StreamRow,
)
from anabranch._model.streams import TRIM_HORIZON, Position, after_sequence_number, at_timestamp
from anabranch.reasons import (
    NoLiveWorker,
    NotTakenYet,
    PausedInStore,
    ReadsThrottled,
    StoppedByHandler,
    StreamNotRead,
    WaitsForParents,
    WorkerDead,
    WorkersFull,
    WorkerSilent,
    WorkersStopping,
)

KEY = "1:orders:1"
APP = AppRow(app="billing", app_id="id", created_wall_ms=5_000)
STREAM = StreamRow(stream_key=KEY, name="orders", arn="arn:orders", created_seconds=1.0, origin=TRIM_HORIZON)

SLOW = ReadsThrottled(error="Rate exceeded", failure_count=2)
FAILED = StoppedByHandler(position="9", partition_key="user-1", attempts=3, error="ValueError")


def member(name="a", **fields):
    return MemberRow(**{"member_id": name, "expiry_ms": 10_000, **fields})


def lease(number=0, key=KEY, generation=0, **fields):
    return LeaseRow(key=LeaseKey(key, generation, f"shard-{number}"), **fields)


def said(number=0, reason=None, behind_ms=0, rate=0.0, lag_ms=None, left=None, handled_through=None):
    return ShardStatus(lease(number).key.short_name, reason, behind_ms, rate, None, lag_ms, left, handled_through)


def status_of(name, *shards, **totals):
    return StatusRow(member_id=name, revision=1, shards=shards, **totals)


def view(leases=(), members=(), dead=(), streams=(STREAM,), watched_ms=0, statuses=(), fresh=("a",)):
    observer = FleetObserver()
    rows = FleetRows(app=APP, streams=streams, members=members, leases=leases, statuses=statuses, dead_members=dead)
    observer.view(replace(rows, statuses=[row for row in statuses if row.member_id not in fresh]), 1_000, 100.0)
    return observer.view(rows, 1_000 + watched_ms, 100.0)


def member_a(observer, now_ms, revision=None, **fields):
    """What is known of member `a` when its rows are seen at this time."""
    statuses = [] if revision is None else [StatusRow(member_id="a", revision=revision)]
    rows = FleetRows(app=APP, streams=(), members=[member(**fields)], leases=(), statuses=statuses)
    return observer.view(rows, now_ms, 100.0).members[0]


def one(*leases, **others):
    shard = view(leases, **others).shards[-1]
    return shard.state, shard.reason


def test_a_held_shard_moves_as_its_owner_says():
    row = lease(owner="a", checkpoint=Checkpoint(Position(7, 2)), checkpointed_at_wall_ms=9_000, records_handled=40)
    told = status_of("a", said(0, None, 1_500, 12.5, 9_000, 50), records_per_second=12.5, millis_behind_latest=1_500)
    status = view([row], [member()], statuses=[told])
    shard = status.shards[0]
    assert (shard.stream, shard.state, shard.reason, shard.worker_id) == ("orders", "reading", None, "a")
    assert (shard.checkpoint, shard.checkpointed_seconds, shard.records_handled) == ("7:2", 9.0, 40)
    assert (shard.millis_behind_latest, shard.records_per_second) == (1_500, 12.5)
    assert (status.millis_behind_latest, status.records_per_second, status.unreported_count) == (1_500, 12.5, 0)
    assert (status.app, status.created_seconds, status.streams) == ("billing", 5.0, ("orders",))
    assert (shard.lag, shard.retention_left, status.members[0].lag) == (9.0, 50, 9.0)
    assert (status.lag, status.retention_left) == (9.0, 50)
    assert status.stalled_shards == ()


ALL_BEFORE_80 = Checkpoint(Position(7), seen_through_seconds=80.0)
LAST_WORDS = status_of("a", said(0, lag_ms=9_000, left=60, handled_through=71.0))
DEAD = {"members": [member()], "dead": ("a",), "fresh": ()}


@pytest.mark.parametrize(
    "row, others, state, lag, left",
    [
        ({"owner": "a"}, {**DEAD, "statuses": [LAST_WORDS]}, "orphaned", 29.0, 40.0),
        ({"owner": "a"}, {"members": [member()], "statuses": [LAST_WORDS], "watched_ms": 20_000},
         "orphaned", 29.0, 40.0),
        ({"owner": "a", "checkpoint": ALL_BEFORE_80}, {**DEAD, "statuses": [LAST_WORDS]}, "orphaned", 20.0, 49.0),
        ({"owner": "a", "checkpoint": ALL_BEFORE_80}, DEAD, "orphaned", 20.0, None),
        ({"owner": "a"}, DEAD, "orphaned", None, None),
        ({"owner": "a"}, {"members": [member(state="sealed"), member("b")], "statuses": [LAST_WORDS]},
         "unowned", 29.0, 40.0),
        ({"checkpoint": ALL_BEFORE_80}, {}, "unowned", 20.0, None),
        ({"checkpoint": ALL_BEFORE_80}, {"members": [member(shards_max=0)]}, "unowned", 20.0, None),
        # a worker takes it in a moment, and how far it is was last written up to an hour ago
        ({"checkpoint": ALL_BEFORE_80}, {"members": [member()]}, "unowned", None, None),
        # a live owner writes no status while nobody looks
        ({"owner": "a", "checkpoint": ALL_BEFORE_80}, {"members": [member()], "statuses": [LAST_WORDS], "fresh": ()},
         "reading", None, None),
        ({"waits_for": ("shard-0",), "checkpoint": ALL_BEFORE_80}, {}, "waiting", None, None),
    ],
)  # fmt: skip
def test_the_lag_of_a_shard_that_nobody_handles_grows_since_all_was_handled(row, others, state, lag, left):
    parent = [] if "waits_for" not in row else [lease(0)]
    shard = view([*parent, lease(len(parent), **row)], **others).shards[-1]
    assert (shard.state, shard.lag, shard.retention_left) == (state, lag, left)


def test_a_stopped_shard_is_behind_by_the_age_of_its_record_even_without_a_report():
    stop = Stopped(replace(FAILED, arrival_seconds=40.0), Position(9), "user-1", "a", 5_000)
    assert view([lease(stopped=stop)]).shards[0].lag == 60.0
    told = status_of("a", said(0, FAILED, lag_ms=61_000))
    assert view([lease(owner="a", stopped=stop)], [member()], statuses=[told]).shards[0].lag == 61.0
    assert view([lease(stopped=replace(stop, reason=FAILED))]).shards[0].lag is None


def test_a_status_that_may_be_old_shows_reasons_but_no_lag_and_no_rate():
    told = status_of("a", said(reason=SLOW, behind_ms=1_500, rate=12.5), records_per_second=12.5)
    status = view([lease(owner="a")], [member()], statuses=[told], fresh=())
    assert (status.shards[0].state, status.shards[0].reason) == ("stalled", SLOW)
    assert (status.shards[0].millis_behind_latest, status.shards[0].records_per_second) == (None, None)
    assert (status.members[0].records_per_second, status.members[0].status_seen) == (None, False)
    assert (status.millis_behind_latest, status.records_per_second) == (None, 0.0)


def test_the_totals_count_shards_that_the_status_does_not_name():
    told = status_of("a", said(behind_ms=10), records_per_second=70.0, millis_behind_latest=9_000)
    status = view([lease(0, owner="a"), lease(1, owner="a")], [member()], statuses=[told])
    assert (status.millis_behind_latest, status.records_per_second) == (9_000, 70.0)


def test_a_status_is_new_if_it_moved_between_two_looks_in_a_row():
    observer = FleetObserver()
    assert not member_a(observer, 0, revision=1).status_seen, "it may be of yesterday"
    assert not member_a(observer, 1_000, revision=1).status_seen
    assert member_a(observer, 2_000, revision=2).status_seen
    assert member_a(observer, 7_000, revision=2).status_seen
    assert not member_a(observer, 17_000, revision=2).status_seen, "it is old by now"
    assert not member_a(observer, 600_000, revision=9).status_seen, "it may have been written right after the last look"
    assert not member_a(observer, 600_000).status_seen


def test_a_shard_that_no_status_has_spoken_of_is_counted():
    status = view([lease(0, owner="a"), lease(1, owner="a")], [member()], statuses=[status_of("a", said(0))])
    assert status.unreported_count == 1
    assert status.shards[1].millis_behind_latest is None
    assert status.shards[1].state == "reading"


def test_what_an_owner_says_of_a_shard_of_another_stream_does_not_count():
    other = replace(STREAM, stream_key="1:returns:1", name="returns", arn="arn:returns")
    rows = [lease(owner="a"), lease(owner="a", key="1:returns:1")]
    status = view(rows, [member()], streams=(STREAM, other), statuses=[status_of("a", said(reason=SLOW))])
    assert [(shard.stream, shard.reason) for shard in status.shards] == [("orders", SLOW), ("returns", None)]


@pytest.mark.parametrize(
    "row, members, dead, state, reason",
    [
        ({"owner": "a"}, [member()], ("a",), "orphaned", WorkerDead(worker_id="a")),
        ({"owner": "a", "paused": True}, [member()], (), "paused", PausedInStore()),
        ({}, [], (), "unowned", NoLiveWorker()),
        ({"owner": "a"}, [member(state="left")], (), "unowned", NoLiveWorker()),
        ({"owner": "a"}, [], (), "unowned", NoLiveWorker()),
        ({}, [member(streams=("another",))], (), "unowned", StreamNotRead(stream="orders")),
        ({}, [member(streams=("another",)), member("b", draining=True)], (), "unowned", WorkersStopping()),
        ({}, [member(draining=True)], (), "unowned", WorkersStopping()),
        ({}, [member(shards_max=0)], (), "unowned", WorkersFull()),
        ({}, [member(shards_max=1)], (), "unowned", NotTakenYet()),
        ({"owner": "a"}, [member(state="sealed"), member("b")], (), "unowned",
         NotTakenYet()),
        ({"finish": Finish("end", ("shard-1",))}, [], (), "finished", None),
    ],
)  # fmt: skip
def test_why_a_shard_does_not_move(row, members, dead, state, reason):
    assert one(lease(**row), members=members, dead=dead) == (state, reason)


def test_a_shard_is_stalled_for_the_reason_that_its_owner_says():
    told = status_of("a", said(reason=SLOW))
    assert one(lease(owner="a"), members=[member()], statuses=[told]) == ("stalled", SLOW)


def test_a_member_without_heartbeats_for_its_expiry_is_silent():
    row = lease(owner="a")
    assert one(row, members=[member()], watched_ms=9_999) == ("reading", None)
    orphaned = ("orphaned", WorkerSilent(worker_id="a", seconds=10.0))
    assert one(row, members=[member()], watched_ms=10_000) == orphaned
    told = status_of("a", said(rate=5.0), records_per_second=5.0, millis_behind_latest=9)
    silent = view([row], [member()], watched_ms=10_000, statuses=[told])
    assert (silent.records_per_second, silent.millis_behind_latest) == (0, None)


def test_heartbeats_are_seen_from_the_second_look_on():
    observer = FleetObserver()
    assert not member_a(observer, 0, counter=4).heartbeat_seen
    assert not member_a(observer, 500, counter=4).heartbeat_seen
    assert member_a(observer, 900, counter=5).heartbeat_seen
    still = member_a(observer, 1_000, counter=5)
    assert (still.heartbeat_seen, still.heartbeat_age) == (True, 0.1)
    member_a(observer, 1_100, member_id="b")
    assert not member_a(observer, 1_200, counter=5).heartbeat_seen


def test_a_child_waits_for_those_of_its_parents_that_are_not_finished():
    rows = [lease(0, finish=Finish("end")), lease(1, owner="a"), lease(2, waits_for=("shard-0", "shard-1", "shard-9"))]
    status = view(rows, [member()])
    assert [shard.state for shard in status.unfinished_shards] == ["reading", "waiting"]
    assert status.shards[2].waits_for == ("shard-1",)
    assert status.shards[2].reason == WaitsForParents(parents=("shard-1",))


def test_a_stopped_shard_stays_so_until_a_process_that_joined_later_tries_again():
    stopped = Stopped(FAILED, Position(9), "user-1", "a", 2_000)
    row = lease(owner="a", stopped=stopped)
    for members in ([member(joined_wall_ms=1_999)], [member(joined_wall_ms=2_000)], [], [member(state="left")]):
        assert one(row, members=members) == ("stopped", FAILED)
    assert one(row, members=[member(joined_wall_ms=2_001)]) == ("reading", None)
    record = view([row]).shards[0].stopped
    assert (record.position, record.partition_key, record.stopped_seconds) == ("9", "user-1", 2.0)
    assert view([lease(stopped=replace(stopped, position=None))]).shards[0].stopped.position is None


def test_a_stopped_shard_stays_so_if_its_owner_joined_again_but_had_started_before():
    row = lease(owner="a", stopped=Stopped(FAILED, Position(9), "user-1", "a", 2_000))
    statuses = [status_of("a", said(reason=FAILED))]
    (shard,) = view([row], [member(joined_wall_ms=2_001)], statuses=statuses).shards
    assert (shard.state, shard.reason) == ("stopped", FAILED)


def test_older_generations_and_a_stream_that_was_made_again_are_left_out():
    old = replace(STREAM, stream_key="1:orders:0", created_seconds=0.5)
    rows = [lease(key="1:orders:0"), lease(key="1:nowhere:1"), lease(generation=0), lease(generation=1)]
    streams = (old, replace(STREAM, generation=1))
    assert [shard.fence_token for shard in view(rows, streams=streams).shards] == [1 << 32]
    assert view(rows, streams=tuple(reversed(streams))).streams == ("orders",)


@pytest.mark.parametrize(
    "start, text",
    [
        (TRIM_HORIZON, "TRIM_HORIZON"),
        (at_timestamp(1.5), "AT_TIMESTAMP 1.500"),
        (after_sequence_number(7), "AFTER_SEQUENCE_NUMBER 7"),
    ],
)
def test_a_shard_without_a_checkpoint_says_where_it_starts(start, text):
    shard = view([lease(start=start)]).shards[0]
    assert (shard.checkpoint, shard.starts_at, shard.checkpointed_seconds) == (None, text, None)
