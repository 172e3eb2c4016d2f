"""Rule U7, for one shard: which worker gets a shard that cannot be read here."""

import pytest
from msgspec.structs import replace

from anabranch._core.leases.lease_table import LeaseTable
from anabranch._core.leases.members import FailureDetector
from anabranch._core.leases.plan import give_unreadable
from anabranch._core.leases.timing import lease_timing
from anabranch._model.leases import HandOffRequest, LeaseKey, LeaseRow, MemberRow

KEY = LeaseKey("1:orders:1", 0, "shardId-000000000000")
ME = MemberRow(member_id="me#1", expiry_ms=10_000)
BUSY = replace(ME, member_id="busy#1", load=4)
IDLE = replace(ME, member_id="idle#1", load=1)


def relief(*members, now_ms=0, **fields):
    table, detector = LeaseTable("me#1", 10_000), FailureDetector(lease_timing())
    detector.observe([ME, *members], 0)
    table.hold(LeaseRow(key=KEY, owner="me#1", version=3))
    for name, value in fields.items():
        setattr(table.held[KEY], name, value)
    return give_unreadable(table, detector, KEY, now_ms)


def test_the_member_with_the_fewest_shards_gets_it():
    assert relief(BUSY, IDLE) == HandOffRequest(KEY, "idle#1")
    assert relief(replace(IDLE, member_id="zoe#1"), IDLE) == HandOffRequest(KEY, "idle#1")


@pytest.mark.parametrize("flaw", [{"reads_healthy": False}, {"draining": True}, {"shards_max": 1}, {"state": "left"}])
def test_it_is_kept_if_no_other_worker_could_read_it_better(flaw):
    assert relief() is None
    assert relief(replace(IDLE, **flaw)) is None


def test_it_is_not_given_while_it_moves_or_was_kept_for_calls_that_do_not_end():
    assert relief(IDLE, state="draining") is None
    assert relief(IDLE, kept_until_ms=1, now_ms=0) is None
    assert relief(IDLE, kept_until_ms=1, now_ms=1) is not None


def test_a_lease_that_is_not_held_any_more_cannot_be_given():
    assert give_unreadable(LeaseTable("me#1", 10_000), FailureDetector(lease_timing()), KEY, 0) is None
