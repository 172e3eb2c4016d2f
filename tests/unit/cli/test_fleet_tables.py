"""A fleet as lines: what needs a look first, never more lines than there are."""

import pytest
from msgspec.structs import replace

from anabranch._cli.fleet_tables import fleet_lines, headline
from anabranch.reports import FleetStatus
from fleet_samples import MEMBER, SHARD


def member(number, **fields):
    made = replace(MEMBER, member_id=f"worker-{number}#1", worker_id=f"worker-{number}", records_per_second=12.5)
    return replace(made, **fields)


def shard(number, state="moving", reason=None, **fields):
    made = replace(
        SHARD,
        shard_id=f"shardId-{number:012d}",
        state=state,
        reason=reason,
        owner="worker-0#1",
        worker_id="worker-0",
        millis_behind_latest=number * 1_000,
        records_per_second=5.0,
    )
    return replace(made, **fields)


def fleet(shards, members, streams=("orders",)):
    return FleetStatus(
        app="billing",
        created_seconds=0.0,
        streams=streams,
        members=tuple(members),
        shards=tuple(shards),
        unreported_count=0,
    )


def texts(status, **options):
    return [line.plain for line in fleet_lines(status, **options)]


def test_what_does_not_move_comes_first_with_its_reason():
    shards = [
        shard(0),
        shard(1, "finished"),
        shard(2, "waiting", "it waits"),
        shard(3, "stopped", "bad\nrecord"),
        shard(4),
    ]
    lines = texts(fleet(shards, [member(0)]))
    assert [line.split()[0] for line in lines[4:]] == [
        "shardId-000000000003", "bad", "shardId-000000000002", "it", "shardId-000000000004", "shardId-000000000000",
        "and",
    ]  # fmt: skip
    assert lines[4].split()[1:] == ["stopped", "worker-0", "3.0", "s", "5.0", "never"]
    assert lines[5] == "    bad record"
    assert lines[-1] == "and 1 shard read to the end"


def test_members_tell_their_state_and_when_their_heart_was_seen_to_beat():
    members = [
        member(0, state="left"),
        member(1, draining=True),
        member(2, heartbeat_seen=False, records_per_second=0.0),
        member(3, state="silent", heartbeat_age=75.0),
    ]
    lines = texts(fleet([], members))
    assert [line.split() for line in lines[:4]] == [
        ["WORKER", "STATE", "BEAT", "SHARDS", "RECORDS/S"],
        ["worker-1", "stopping", "0.4", "s", "1", "12"],
        ["worker-2", "live", "-", "1", "0"],
        ["worker-3", "silent", "1.2", "min", "1", "-"],
    ]
    assert lines[4] == "and 1 worker that stopped gracefully"


@pytest.mark.parametrize("height", [10, 12, 21, 40])
@pytest.mark.parametrize("member_count", [0, 3, 30])
def test_no_more_lines_than_there_are_and_the_rest_is_counted(height, member_count):
    shards = [shard(number, "stalled", "slow") if number % 2 else shard(number) for number in range(100)]
    status = fleet([*shards, shard(200, "finished")], [member(number) for number in range(member_count)])
    lines = texts(status, height=height)
    assert len(lines) <= height
    shown = sum(line.startswith("shardId-") for line in lines)
    assert shown > 0
    assert lines[-1] == f"and {100 - shown} shards more, 1 shard read to the end"
    assert all(len(line) <= 80 for line in lines)


def test_long_names_are_cut_and_several_streams_are_told_apart():
    status = fleet([shard(0, worker_id="w" * 50)], [member(0)], streams=("orders", "returns"))
    line = texts(status)[-1]
    assert line.startswith("orders shardId-000000000000  moving")
    assert f"{'w' * 29}…" in line


def test_a_checkpoint_is_told_by_its_age():
    assert texts(fleet([shard(0, checkpointed_seconds=0.0)], []))[-1].endswith(" d ago")


def test_the_headline_counts():
    shards = [shard(0), shard(1), shard(2, "stopped", "bad", millis_behind_latest=None)]
    members = [member(0), member(1, state="dead", records_per_second=0.0)]
    assert headline(fleet(shards, members)) == (
        "1 worker live, 3 shards: 2 moving, 1 stalled; 1.0 s behind, 12 records/s"
    )
    assert headline(fleet([], [])) == "0 workers live, 0 shards, 0 records/s"
