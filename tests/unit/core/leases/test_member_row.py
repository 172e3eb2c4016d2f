"""The row that each heartbeat writes stays under 1 KB, whatever the workers, streams and shards are called."""

import msgspec
import pytest
from msgspec.structs import replace

from anabranch._core.leases import rows
from anabranch._model.leases import (
    CHANGED_MAX,
    REQUESTS_MAX,
    WORKER_ID_BYTES_MAX,
    HandOffRequest,
    HeartbeatWrite,
    LeaseKey,
    MemberRow,
    parse_short_name,
    short_id,
)
from anabranch.stores import decode_row, encode_row

STREAMS = [f"123456789012:{letter * 128}:1700000000" for letter in "abcdefghijklmnopqrstuvwxy"]
LONGEST = "shardId-999999999999"
KEYS = [LeaseKey(STREAMS[number], 9_999, LONGEST) for number in range(9)]


def member_id(number):
    return f"{'w' * WORKER_ID_BYTES_MAX}#{number:032x}"


def test_the_largest_heartbeat_row_with_25_streams_stays_under_1_kb():
    row = MemberRow(
        member_id=member_id(0),
        expiry_ms=86_400_000,
        protocol="10.10",
        order="shard",
        streams=tuple(map(short_id, STREAMS)),
        shards_max=99_999,
        joined_wall_ms=9_999_999_999_999,
    )
    write = HeartbeatWrite(
        member_id=row.member_id,
        attempt=999_999_999,
        load=99_999,
        change_count=999_999_999,
        changed=tuple(key.short_name for key in KEYS[:CHANGED_MAX]),
    )
    row = rows.heartbeat(row, write)
    for number, key in enumerate(KEYS):
        row = rows.request_hand_off(row, HandOffRequest(key, member_id(number)).short_name)
    row = replace(row, state="sealed")
    assert len(row.wanted) == REQUESTS_MAX
    assert len(encode_row(row)) < 1024
    assert decode_row("member", encode_row(row)) == row


@pytest.mark.parametrize("field", ["streams", "wanted", "counter", "state"])
def test_a_row_with_a_value_of_another_type_is_not_a_row(field):
    fields = msgspec.json.decode(encode_row(MemberRow(member_id="a", expiry_ms=1)))
    with pytest.raises(ValueError):
        decode_row("member", msgspec.json.encode(fields | {field: ["x"]}))


@pytest.mark.parametrize("shard_id", ["shardId-000000000012", "shardId-000000000000", LONGEST])
def test_a_short_name_leads_back_to_a_lease_of_a_known_stream(shard_id):
    key = LeaseKey(STREAMS[1], 2, shard_id)
    assert parse_short_name(key.short_name, STREAMS) == key
    assert parse_short_name(key.short_name, STREAMS[2:]) is None


@pytest.mark.parametrize("shard_id", ["shardId-12", "shardId-0000000000012", "shard-\u0661" * 40, "7", "a/b", "a b"])
def test_a_shard_of_an_unusual_name_has_a_short_name_that_leads_nowhere(shard_id):
    name = LeaseKey(STREAMS[0], 0, shard_id).short_name
    assert len(name) <= 30
    assert " " not in name
    assert parse_short_name(name, STREAMS) is None


@pytest.mark.parametrize("name", ["", "/", "a/b/c", "//", f"{short_id(STREAMS[0])}/0", f"{short_id(STREAMS[0])}/-1/2"])
def test_a_name_that_this_version_does_not_understand_leads_nowhere(name):
    assert parse_short_name(name, STREAMS) is None


def test_a_worker_id_is_the_part_before_the_random_part():
    assert MemberRow(member_id="pod#7#0f", expiry_ms=1).worker_id == "pod#7"
    assert MemberRow(member_id="pod", expiry_ms=1).worker_id == "pod"
