"""A shard's situation in words: every state has its sentences, and something to do."""

from pathlib import Path

import pytest
from msgspec.structs import replace

import anabranch
from anabranch._cli.explain import _REMEDIES, explain_fleet, explain_shard, explain_unleased
from anabranch._model.hash_keys import HashKeyRange
from anabranch._model.streams import Shard
from anabranch.reports import FleetStatus, StoppedRecord
from fleet_samples import MEMBER, SHARD

PACKAGE = Path(anabranch.__file__).parent
STOPPED = StoppedRecord(
    reason="its handler failed 3 times", position="50", partition_key="user-1", member_id="a#1", stopped_seconds=1.5
)


def fleet(*shards, members=(MEMBER,)):
    return FleetStatus(
        app="billing", created_seconds=0.0, streams=("orders",), members=members, shards=shards, unreported_count=0
    )


def explain(shard, *others, members=(MEMBER,)):
    explanation = explain_shard(shard, fleet(shard, *others, members=members))
    return " ".join(explanation.situation), explanation.remedy


def test_a_shard_that_moves_needs_nothing():
    assert explain(SHARD) == (
        (
            "shardId-000000000001 of orders is moving. a holds it, whose last heartbeat was 0.4 s ago. "
            "Everything up to 49:3 is handled; it is 1.5 s behind, at 12 records per second."
        ),
        None,
    )
    fresh = replace(SHARD, checkpoint=None, millis_behind_latest=0, records_per_second=None, takes_without_progress=3)
    situation, remedy = explain(fresh)
    assert "It has no checkpoint yet: it starts at TRIM_HORIZON; it is at the tip, at 0 records" in situation
    assert "3 holders in a row have made no progress on it." in situation
    assert remedy is None


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
    lagging = replace(SHARD, shard_id="shardId-000000000000", state="stalled", reason="x")

    def explained(number, *leases):
        return explain_unleased(shards[f"shardId-{number:012}"], shards, "orders", fleet(*leases))

    found = explained(4, SHARD, lagging)
    assert found.state == "waiting"
    assert "when shardId-000000000000 and shardId-000000000001 have been read to the end" in found.situation[1]
    assert "see why shardId-000000000000 is stalled" in found.remedy
    assert "when shardId-000000000001 has been read to the end" in explained(2, SHARD, lagging).situation[1]
    assert explained(2, replace(SHARD, state="finished"), lagging) is None
    assert explained(2, replace(SHARD, stream="returns")) is None


def test_a_stopped_shard_names_its_record_and_how_it_is_tried_again():
    stopped = replace(SHARD, state="stopped", reason=STOPPED.reason, stopped=STOPPED, checkpointed_seconds=1.0)
    situation, remedy = explain(stopped)
    assert (
        "It stopped at 1970-01-01T00:00:01.500Z at record 50 of key 'user-1': its handler failed 3 times." in situation
    )
    assert "nothing is skipped" in situation
    assert remedy.startswith("fix the handler for that record, and restart a worker: each worker that is started")
    assert "and start a worker" in explain(stopped, members=())[1]
    without = replace(
        stopped, stopped=replace(STOPPED, position=None, reason="6 owners in a row made no progress here")
    )
    situation, remedy = explain(without)
    assert "6 owners in a row made no progress here." in situation
    assert remedy.startswith("find out what kills its workers at that record")


def test_a_child_that_waits_names_its_parents_and_what_they_do():
    slow = replace(SHARD, shard_id="shardId-000000000002", millis_behind_latest=90_000)
    stuck = replace(SHARD, shard_id="shardId-000000000003", state="stopped", stopped=STOPPED, millis_behind_latest=None)
    child = replace(SHARD, state="waiting", owner=None, waits_for=(slow.shard_id, stuck.shard_id))
    situation, remedy = explain(child, slow, stuck)
    assert "shardId-000000000002 is moving (1.5 min behind), shardId-000000000003 has stopped." in situation
    assert remedy == "nothing to do: it starts when they are finished; see why shardId-000000000003 is stalled"
    only = replace(child, waits_for=(slow.shard_id,))
    assert explain(only, slow)[1] == "nothing to do: it starts when it is finished"


@pytest.mark.parametrize(
    "member, others, sentence, remedy",
    [
        ({"state": "dead"}, (), "The process of a is gone; it did not shut down cleanly.", "start a worker"),
        ({"state": "dead"}, (replace(MEMBER, member_id="b"),), "is gone", "nothing to do: one of 1 live worker"),
        ({"state": "silent", "heartbeat_age": 12.0}, (), "a has sent no heartbeat for 12 s", "start a worker"),
        ({"state": "silent"}, (), "It starts no handler calls until the lease store answers", "start a worker"),
    ],
)
def test_a_shard_whose_worker_shows_no_life(member, others, sentence, remedy):
    situation, todo = explain(replace(SHARD, state="orphaned"), members=(replace(MEMBER, **member), *others))
    assert sentence in situation
    assert todo.startswith(remedy)


@pytest.mark.parametrize(
    "reason, members, remedy",
    [
        ("no worker of the application is alive", (), "start a worker, for example with `anabranch run"),
        (
            "every worker of the application is stopping",
            (replace(MEMBER, draining=True),),
            "start a worker: the present ones",
        ),
        ("every worker holds as many shards as it may (max_shards)", (MEMBER,), "start another worker, or raise"),
        ("it is free and will be taken soon", (MEMBER,), "nothing to do: one of 1 live worker takes it"),
    ],
)
def test_a_shard_that_nobody_holds(reason, members, remedy):
    shard = replace(SHARD, state="unowned", reason=reason, owner=None, worker_id=None)
    situation, todo = explain(shard, members=members)
    assert reason[1:] in situation
    assert todo.startswith(remedy)


@pytest.mark.parametrize(
    "owner, said",
    [
        ("gone#1", "Its last holder, gone#1, is no longer known."),
        ("left", "Its last holder, a, has stopped gracefully."),
        ("sealed", "Its last holder, a, was declared dead by the others."),
    ],
)
def test_the_last_holder_is_named(owner, said):
    members = (replace(MEMBER, member_id=owner, state=owner),) if owner in {"left", "sealed"} else ()
    shard = replace(SHARD, state="unowned", reason="no worker of the application is alive", owner=owner)
    assert said in explain(shard, members=members)[0]


@pytest.mark.parametrize(
    "reason, member, remedy",
    [
        ("record 5 of key 'a' has not been finished for 12 s", MEMBER, "check that record's handler"),
        ("it is being handed over to b", MEMBER, "nothing to do"),
        ("the byte budget has been full for 12 s", MEMBER, "nothing is lost"),
        ("132 keys have unfinished records, which is the limit", MEMBER, "check the handlers"),
        ("the handler of record 5 ignores its timeout of 3 s at app.py:7", MEMBER, "make the handler return"),
        ("the worker is paused by Consumer.pause()", MEMBER, "call Consumer.resume() in its program"),
        ("AccessDenied", replace(MEMBER, reads_healthy=False), "fix what the error names"),
        ("throttled", MEMBER, "it is retried"),
    ],
)
def test_a_stalled_shard_says_why(reason, member, remedy):
    situation, todo = explain(replace(SHARD, state="stalled", reason=reason), members=(member,))
    assert f"Its worker says: {reason}." in situation
    assert todo.startswith(remedy)


def test_what_is_advised_on_is_what_workers_say():
    """Remedies are found by the words of a reason: a worker must still use them."""
    sources = [path for path in PACKAGE.rglob("*.py") if "_cli" not in path.parts]
    said = "\n".join(path.read_text() for path in sources)
    assert [words for words, _ in _REMEDIES if words not in said] == []


def test_paused_and_finished_shards():
    situation, remedy = explain(replace(SHARD, state="paused", owner=None))
    assert "No worker holds it." in situation
    assert remedy == "resume it"
    ended = replace(SHARD, state="finished", children=("shardId-000000000004", "shardId-000000000005"))
    assert explain(ended) == (
        (
            "shardId-000000000001 of orders was read to its end. "
            "Its records go on in shardId-000000000004 and shardId-000000000005."
        ),
        None,
    )
    assert explain(replace(ended, children=()))[0].endswith("It has no children: nothing follows it.")


def test_the_application_as_a_whole():
    stalled = replace(SHARD, state="stalled", reason="throttled")
    assert explain_fleet(fleet(SHARD, SHARD)) == [
        "Application billing reads orders.",
        "1 live worker: a.",
        "2 shards, none stalled.",
    ]
    assert explain_fleet(fleet(SHARD, stalled))[-1] == "1 of 2 shards is stalled."
    dead = replace(MEMBER, state="dead")
    lines = explain_fleet(fleet(stalled, stalled, members=(dead,)))
    assert lines[1:] == [
        "No worker is running: nothing is read until you start one.",
        "The process of a is gone; it did not shut down cleanly.",
        "2 of 2 shards are stalled.",
    ]
    empty = FleetStatus(app="x", created_seconds=0.0, streams=(), members=(), shards=(), unreported_count=0)
    assert explain_fleet(empty)[0] == "Application x reads no stream yet."
