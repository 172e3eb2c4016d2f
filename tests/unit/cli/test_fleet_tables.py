"""A fleet as lines: what needs attention first, and no line that is wider than the terminal."""

import io

import pytest
from msgspec.structs import replace
from rich.cells import cell_len
from rich.console import Console

from anabranch._cli.fleet_tables import fleet_lines, headline
from anabranch.reasons import UnknownReason
from anabranch.reports import FleetStatus, FleetSubscription
from fleet_samples import MEMBER, SHARD


def said(text):
    return UnknownReason(code="new", text=text)


def member(number, **fields):
    made = replace(MEMBER, member_id=f"worker-{number}#1", worker_id=f"worker-{number}", records_per_second=12.5)
    return replace(made, **fields)


def shard(number, state="reading", reason=None, **fields):
    made = replace(
        SHARD,
        shard_id=f"shardId-{number:012d}",
        state=state,
        reason=reason,
        owner="worker-0#1",
        worker_id="worker-0",
        lag=float(number),
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


def texts(status, width=None):
    console = Console(force_terminal=width is not None, width=width, file=io.StringIO())
    return [line.plain for line in fleet_lines(status, console)]


def test_what_does_not_move_comes_first_with_its_reason():
    shards = [
        shard(0),
        shard(1, "finished"),
        shard(2, "waiting", said("it waits")),
        shard(3, "stopped", said("bad\nrecord")),
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


def test_members_show_their_state_and_their_last_heartbeat():
    members = [
        member(0, state="left"),
        member(1, draining=True),
        member(2, heartbeat_seen=False, records_per_second=0.0),
        member(3, state="silent", heartbeat_age=75.0),
    ]
    lines = texts(fleet([], members))
    assert [line.split() for line in lines[:4]] == [
        ["WORKER", "STATE", "HEARTBEAT", "SHARDS", "RECORDS/S"],
        ["worker-1", "stopping", "0.4", "s", "1", "12"],
        ["worker-2", "live", "-", "1", "0"],
        ["worker-3", "silent", "1.2", "min", "1", "-"],
    ]
    assert lines[4] == "and 1 worker that stopped gracefully"


@pytest.mark.parametrize("width", [60, 80, 120])
def test_every_line_fits_the_terminal_and_reasons_are_whole(width):
    reason = "the handler of record 49590338271490256608559692538361571095921575989136588898 has not been finished"
    shards = [
        shard(number, "stalled", said(reason), worker_id="ip-10-0-0-12.eu-west-1.compute.internal:93")
        for number in (1, 2)
    ]
    status = fleet([*shards, shard(3, worker_id="運賃計算係" * 6)], [member(0, worker_id="運賃計算係" * 6)])
    lines = texts(status, width)
    assert max(map(cell_len, lines)) <= width
    assert lines[3].split() == ["SHARD", "STATE", "WORKER", "BEHIND", "RECORDS/S", "COMMITTED"]
    assert all(line.rstrip().endswith("never") for line in lines if line.startswith("shardId"))
    assert reason.replace(" ", "") in "".join("".join(lines).split())


def test_columns_of_wide_characters_are_aligned():
    lines = texts(fleet([], [member(0, worker_id="運賃"), member(1, worker_id="four")]), 80)
    assert [cell_len(line[: line.index("live")]) for line in lines[1:3]] == [8, 8]


def test_a_name_that_is_too_long_loses_its_middle():
    status = fleet([shard(7)], [member(0)], streams=("orders", "returns"))
    shard_name = texts(status, 64)[-1].split("  ")[0]
    assert shard_name.startswith("orders")
    assert shard_name.endswith("0007")
    assert "…" in shard_name
    assert texts(status)[-1].startswith("orders shardId-000000000007  reading")


def test_a_checkpoint_is_shown_with_its_age():
    assert texts(fleet([shard(0, checkpointed_seconds=0.0)], []))[-1].endswith(" d ago")


def test_the_headline_counts():
    shards = [shard(0), shard(1), shard(2, "stopped", "bad", lag=None)]
    members = [member(0), member(1, state="dead", records_per_second=0.0)]
    assert headline(fleet(shards, members)) == (
        "1 worker live, 3 shards: 2 reading, 1 stalled; 1.0 s behind, 12 records/s"
    )
    assert headline(fleet([], [])) == "0 workers live, 0 shards, 0 records/s"


def test_with_fan_out_each_shard_shows_its_subscription_and_those_without_one_come_first():
    def subscribed(state, seconds):
        return FleetSubscription(state=state, seconds=seconds, renewal_count=3, event_seconds_ago=2.0, reason_code=None)

    shards = [
        shard(9, subscription=subscribed("active", 125.0)),
        shard(1, subscription=subscribed("polled", None)),
        shard(0),
    ]
    lines = texts(fleet(shards, [member(0)]))
    table = lines[next(index for index, line in enumerate(lines) if "SUBSCRIPTION" in line) :]
    assert table[0].split()[-2:] == ["SUBSCRIPTION", "EVENT"]
    assert [line.split()[0][-1] for line in table[1:4]] == ["1", "9", "0"]
    assert "polled r3" in table[1]
    assert "2.1 min r3" in table[2]
    assert table[3].split()[-2:] == ["-", "-"]
    assert not any("SUBSCRIPTION" in line for line in texts(fleet([shard(0)], [member(0)])))
