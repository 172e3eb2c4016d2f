"""A shard's situation in words: every state has its sentences, and something to do."""

import pytest
from msgspec.structs import replace

from anabranch._cli.explain import explain_fleet, explain_shard, explain_unleased
from anabranch._model.hash_keys import HashKeyRange
from anabranch._model.streams import Shard
from anabranch.reasons import (
    NoLiveWorker,
    PausedInStore,
    ReadsThrottled,
    StoppedByCrashes,
    StoppedByHandler,
    UnknownReason,
    WaitsForParents,
)
from anabranch.reports import FleetStatus, FleetSubscription, StoppedRecord
from fleet_samples import MEMBER, SHARD
from reason_samples import SAMPLES

THROTTLED = ReadsThrottled(error="Rate exceeded", failure_count=2)

STOPPED = StoppedRecord(
    reason=StoppedByHandler(position="50", partition_key="user-1", attempts=3, error="ValueError: x"),
    position="50",
    partition_key="user-1",
    member_id="a#1",
    stopped_seconds=1.5,
)


def fleet(*shards, members=(MEMBER,)):
    return FleetStatus(
        app="billing", created_seconds=0.0, streams=("orders",), members=members, shards=shards, unreported_count=0
    )


def explain(shard, *others, members=(MEMBER,)):
    explanation = explain_shard(shard, fleet(shard, *others, members=members))
    return " ".join(explanation.situation), explanation.advice


def test_a_shard_that_moves_needs_nothing():
    assert explain(SHARD) == (
        (
            "shardId-000000000001 of orders is being read. It is held by a, whose last heartbeat was 0.4 s ago. "
            "Everything up to 49:3 is handled; it is 1.5 s behind, at 12 records per second."
        ),
        None,
    )
    fresh = replace(SHARD, checkpoint=None, lag=0.0, records_per_second=None, takes_without_progress=3)
    situation, advice = explain(fresh)
    assert "It has no checkpoint yet: it starts at TRIM_HORIZON; it is at the tip." in situation
    assert "3 holders in a row have made no progress on it." in situation
    assert advice is None


def test_a_shard_whose_records_are_about_to_be_trimmed_says_so():
    situation, _ = explain(replace(SHARD, lag=82_800.0, retention_left=3_600.0))
    assert "it is 23.0 h behind, at 12 records per second." in situation
    assert "Its oldest unfinished record is trimmed in 1.0 h: after that it is lost." in situation


def subscription(state="active", **fields):
    made = FleetSubscription(state=state, seconds=None, renewal_count=3, event_seconds_ago=2.0, reason_code=None)
    return replace(made, **fields)


def test_a_shard_that_is_read_with_fan_out_says_how_it_is_subscribed():
    active = replace(SHARD, subscription=subscription(seconds=125.0))
    said = "It is read with fan-out: subscribed for 2.1 min, renewed 3 times; the last event came 2.0 s ago."
    assert said in explain(active)[0]
    polled = replace(SHARD, subscription=subscription("polled", reason_code="subscription-failing"))
    said = "It is read with fan-out, but it is polled for now (subscription-failing); renewed 3 times"
    assert said in explain(polled)[0]
    silent = replace(SHARD, shard_id="shardId-000000000007")
    assert "its subscription is not reported: a worker reports on its 20 worst shards" in explain(silent, active)[0]
    assert "fan-out" not in explain(silent)[0]


def listed(number, *parents):
    first, second, *_ = (*(f"shardId-{parent:012}" for parent in parents), None, None)
    return Shard(
        shard_id=f"shardId-{number:012}",
        hash_key_range=HashKeyRange(0, 9),
        starting_sequence_number=1,
        parent_shard_id=first,
        adjacent_parent_shard_id=second,
    )


def test_a_shard_without_a_lease_waits_for_all_ancestors_that_are_not_finished():
    shards = {shard.shard_id: shard for shard in (listed(2, 1), listed(3, 0), listed(4, 2, 3))}
    lagging = replace(SHARD, shard_id="shardId-000000000000", state="stalled", reason=THROTTLED)

    def explained(number, *leases):
        return explain_unleased(shards[f"shardId-{number:012}"], shards, "orders", fleet(*leases))

    found = explained(4, SHARD, lagging)
    assert found.state == "waiting"
    assert found.reason == WaitsForParents(parents=("shardId-000000000000", "shardId-000000000001"))
    assert "when shardId-000000000000 and shardId-000000000001 have been read to the end" in found.situation[1]
    assert "see why shardId-000000000000 is stalled" in found.advice
    assert "when shardId-000000000001 has been read to the end" in explained(2, SHARD, lagging).situation[1]
    assert explained(2, replace(SHARD, state="finished"), lagging) is None
    assert explained(2, replace(SHARD, stream="returns")) is None


def test_a_stopped_shard_names_its_record_and_how_it_is_tried_again():
    stopped = replace(SHARD, state="stopped", reason=STOPPED.reason, stopped=STOPPED, checkpointed_seconds=1.0)
    situation, advice = explain(stopped)
    assert (
        "At 1970-01-01T00:00:01.500Z it stopped at record 50 of key 'user-1': its handler failed 3 times, the last "
        "time with ValueError: x." in situation
    )
    assert "nothing is skipped" in situation
    assert advice.startswith("fix the handler for that record, then restart a worker: each worker that starts")
    crashes = StoppedByCrashes(owner_count=6)
    situation, advice = explain(replace(stopped, reason=crashes, stopped=replace(STOPPED, reason=crashes)))
    assert "it stopped: 6 owners in a row died here without any progress." in situation
    assert advice.startswith("find out what kills its workers at that record")


def test_a_child_that_waits_names_its_parents_and_what_they_do():
    slow = replace(SHARD, shard_id="shardId-000000000002", lag=90.0)
    stuck = replace(SHARD, shard_id="shardId-000000000003", state="stopped", stopped=STOPPED, lag=None)
    both = (slow.shard_id, stuck.shard_id)
    child = replace(SHARD, state="waiting", owner=None, waits_for=both, reason=WaitsForParents(parents=both))
    situation, advice = explain(child, slow, stuck)
    assert "shardId-000000000002 is being read (1.5 min behind), shardId-000000000003 has stopped." in situation
    assert advice == "nothing to do: it starts when its parents are finished; see why shardId-000000000003 is stalled"
    only = replace(child, waits_for=(slow.shard_id,))
    assert explain(only, slow)[1] == "nothing to do: it starts when its parents are finished"


@pytest.mark.parametrize(
    "owner, said",
    [
        ("gone#1", "Its last holder, gone#1, is no longer known."),
        ("left", "Its last holder, a, has stopped gracefully."),
        ("evicted", "Its last holder, a, was declared dead by the others."),
    ],
)
def test_the_last_holder_is_named(owner, said):
    members = (replace(MEMBER, member_id=owner, state=owner),) if owner in {"left", "evicted"} else ()
    shard = replace(SHARD, state="unowned", reason=NoLiveWorker(), owner=owner)
    assert said in explain(shard, members=members)[0]


@pytest.mark.parametrize("state", ["stalled", "unowned", "orphaned", "paused"])
@pytest.mark.parametrize("reason", SAMPLES, ids=lambda reason: reason.code)
def test_a_shard_is_explained_by_the_text_and_the_advice_of_its_reason(reason, state):
    shard = replace(SHARD, state=state, reason=reason)
    explanation = explain_shard(shard, fleet(shard))
    assert explanation.situation[-1] == f"{reason.text[0].upper()}{reason.text[1:]}."
    assert (explanation.reason, explanation.advice) == (reason, reason.advice)


def test_a_reason_of_a_newer_version_is_shown_on_one_line():
    new = UnknownReason(code="new", text="it waits\nfor  something new")
    situation, advice = explain(replace(SHARD, state="stalled", reason=new))
    assert situation.endswith("It waits for something new.")
    assert advice == new.advice


def test_paused_and_finished_shards():
    situation, advice = explain(replace(SHARD, state="paused", owner=None, reason=PausedInStore()))
    assert "No worker holds it." in situation
    assert advice.startswith("resume the shard")
    ended = replace(SHARD, state="finished", children=("shardId-000000000004", "shardId-000000000005"))
    assert explain(ended) == (
        (
            "shardId-000000000001 of orders was read to its end. "
            "Its records continue in shardId-000000000004 and shardId-000000000005."
        ),
        None,
    )
    assert explain(replace(ended, children=()))[0].endswith("It has no children: nothing follows it.")


def test_the_application_as_a_whole():
    stalled = replace(SHARD, state="stalled", reason=THROTTLED)
    assert explain_fleet(fleet(SHARD, SHARD)) == [
        "Application billing reads orders.",
        "1 live worker: a.",
        "It is 1.5 s behind.",
        "2 shards, none stalled.",
    ]
    assert explain_fleet(fleet(SHARD, stalled))[-1] == "1 of 2 shards is stalled."
    dead = replace(MEMBER, state="dead")
    lines = explain_fleet(fleet(stalled, stalled, members=(dead,)))
    assert lines[1:] == [
        "No worker is running: nothing is read until you start one.",
        "It is 1.5 s behind.",
        "The process of worker a is gone: it did not shut down cleanly.",
        "2 of 2 shards are stalled.",
    ]
    empty = FleetStatus(app="x", created_seconds=0.0, streams=(), members=(), shards=(), unreported_count=0)
    assert explain_fleet(empty)[0] == "Application x reads no stream yet."


def test_the_ways_past_a_stopped_record_are_exact_commands():
    stopped = replace(SHARD, state="stopped", reason=STOPPED.reason, stopped=STOPPED)
    ways = explain_shard(stopped, fleet(stopped)).commands
    assert ways == {
        "to try its record again": "anabranch apps resume billing shardId-000000000001",
        "to go on without that record": "anabranch apps skip billing shardId-000000000001 50",
    }
    twin = replace(stopped, stream="returns")
    ways = explain_shard(stopped, fleet(stopped, twin), "sqlite:///srv/my leases.db").commands
    assert ways["to try its record again"] == (
        "anabranch apps resume billing shardId-000000000001 --stream orders --leases 'sqlite:///srv/my leases.db'"
    )
    ways = explain_shard(stopped, fleet(stopped), "dynamodb://leases?region=eu-west-1").commands
    assert ways["to try its record again"].endswith(" --leases 'dynamodb://leases?region=eu-west-1'")
    ways = explain_shard(stopped, fleet(stopped), "redis://:secret@host?replicas=1").commands
    assert ways["to try its record again"].endswith(" --leases 'redis://…@host?replicas=1'")
    unknown = replace(stopped, stopped=replace(STOPPED, position=None))
    assert list(explain_shard(unknown, fleet(unknown)).commands) == ["to try its record again"]
    assert explain_shard(SHARD, fleet(SHARD)).commands == {}


def test_a_letter_that_is_not_accepted_can_be_skipped():
    reason = next(one for one in SAMPLES if one.code == "letter-not-written")
    waiting = replace(SHARD, state="stalled", reason=reason)
    ways = explain_shard(waiting, fleet(waiting)).commands
    assert ways == {
        "to go on without that record": f"anabranch apps skip billing shardId-000000000001 {reason.position}"
    }
