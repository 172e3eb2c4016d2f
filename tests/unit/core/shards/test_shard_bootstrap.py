import pytest

from anabranch._core.shards.graph import gaps
from anabranch._core.shards.lifecycle import PIN_MARGIN_SECONDS, IncompleteListing, pin, plan_bootstrap, roots
from anabranch._model.hash_keys import HashKeyRange, even_ranges
from anabranch._model.leases import LeaseKey, LeaseRow, StreamRow
from anabranch._model.streams import TRIM_HORIZON, Shard, at_timestamp
from anabranch.errors import ConfigurationError
from anabranch.limits import HASH_KEY_MAX

WHOLE = HashKeyRange(0, HASH_KEY_MAX)
STREAM = StreamRow(stream_key="s", name="s", arn="arn", created_seconds=0.0, origin=TRIM_HORIZON)


def shard(name, hash_key_range=WHOLE, *parents, born=1):
    return Shard(
        shard_id=name,
        hash_key_range=hash_key_range,
        starting_sequence_number=born,
        parent_shard_id=parents[0] if parents else None,
        adjacent_parent_shard_id=parents[1] if len(parents) > 1 else None,
    )


def test_latest_is_pinned_a_margin_before_the_services_clock_but_not_before_the_stream_was():
    assert pin("latest", server_seconds=1_000.0, created_seconds=1.0) == at_timestamp(1_000.0 - PIN_MARGIN_SECONDS)
    assert pin("latest", server_seconds=1_000.0, created_seconds=999.0) == at_timestamp(999.0)


def test_trim_horizon_stays_what_it_is():
    assert pin("trim_horizon", server_seconds=1_000.0, created_seconds=1.0) == TRIM_HORIZON


def test_a_time_is_kept_and_a_future_one_refused_by_the_services_clock():
    assert pin(500.0, server_seconds=1_000.0, created_seconds=1.0) == at_timestamp(500.0)
    assert pin(0, server_seconds=1_000.0, created_seconds=1.0) == at_timestamp(1.0)
    with pytest.raises(ConfigurationError, match="is 60 s in the future by the service's clock"):
        pin(1_060.0, server_seconds=1_000.0, created_seconds=1.0)


def test_roots_come_in_the_order_of_creation():
    left, right = even_ranges(2)
    found = roots([shard("c", WHOLE, "a", "b", born=9), shard("b", right, born=2), shard("a", left, "gone", born=3)])
    assert [each.shard_id for each in found] == ["b", "a"]


def test_generations_that_overlap_are_a_bad_listing():
    left, _ = even_ranges(2)
    planned = plan_bootstrap(STREAM, [shard("a"), shard("b", left, "unlisted")])
    assert planned == IncompleteListing((), overlapping=True)
    assert "different generations" in str(planned)


def test_a_root_that_was_trimmed_while_the_bootstrap_was_interrupted_still_leads_to_its_children():
    left, right = even_ranges(2)
    rows = [LeaseRow(key=LeaseKey("s", 0, "p"), hash_key_range=WHOLE)]
    assert plan_bootstrap(STREAM, [shard("a", left, "p"), shard("b", right, "p")], rows) == ()


def test_gaps_are_counted_within_a_range():
    within = HashKeyRange(10, 19)
    assert gaps([HashKeyRange(0, 14), HashKeyRange(30, 40)], within) == (HashKeyRange(15, 19),)
    assert gaps([HashKeyRange(12, 14), HashKeyRange(16, 40)], within) == (HashKeyRange(10, 11), HashKeyRange(15, 15))
    assert gaps([HashKeyRange(0, 40)], within) == ()
