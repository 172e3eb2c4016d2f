import pytest
from msgspec.structs import replace

from anabranch._core.shards.graph import ShardGraph
from anabranch._core.shards.lifecycle import (
    ShardEnd,
    classify_missing_shard,
    missing_leases,
    open_parents,
    plan_end,
    plan_trimmed,
)
from anabranch._model.hash_keys import HashKeyRange
from anabranch._model.leases import Checkpoint, Finish, LeaseKey, LeaseRow, StreamRow
from anabranch._model.streams import TRIM_HORIZON, Shard, at_timestamp
from anabranch._wire.messages import ChildShard, StreamSummary

STREAM = StreamRow(
    stream_key="s", name="s", arn="arn:stream", created_seconds=100.0, origin=at_timestamp(50.0), bootstrapped=True
)


def key(name):
    return LeaseKey("s", 0, name)


def lease(name, start=None, end=None, **fields):
    hash_key_range = None if start is None else HashKeyRange(start, end)
    return LeaseRow(key=key(name), hash_key_range=hash_key_range, **fields)


def shard(name, start, end, *parents):
    return Shard(
        shard_id=name,
        hash_key_range=HashKeyRange(start, end),
        starting_sequence_number=1,
        parent_shard_id=parents[0] if parents else None,
        adjacent_parent_shard_id=parents[1] if len(parents) > 1 else None,
    )


def child(name, start, end, *parents):
    return ChildShard(name, parents, HashKeyRange(start, end))


# the gate
def by_key(*rows):
    return {row.key: row for row in rows}


def test_a_child_shard_waits_for_both_parents_of_a_merge():
    row = lease("c", waits_for=("a", "b"))
    assert open_parents(row, by_key(lease("a"), lease("b"))) == ("a", "b")
    assert open_parents(row, by_key(lease("a", finish=Finish("end")), lease("b"))) == ("b",)
    assert open_parents(row, by_key(lease("c"), lease("d"))) == ()


def test_a_parent_of_another_generation_opens_and_shuts_no_gate():
    others = [LeaseRow(key=LeaseKey("s", 1, "a")), LeaseRow(key=LeaseKey("t", 0, "a"))]
    assert open_parents(lease("c", waits_for=("a",)), by_key(*others)) == ()


# the end of a shard
def test_a_split_makes_both_children_which_wait_for_their_parent_and_start_at_their_beginning():
    parent = lease("p", 0, 9)
    graph = ShardGraph().extended(child_shards=[child("b", 5, 9, "p"), child("a", 0, 4, "p")], rows=[parent])
    end = plan_end(parent, graph, None, [parent])
    assert end == ShardEnd(
        (lease("a", 0, 4, waits_for=("p",)), lease("b", 5, 9, waits_for=("p",))), Finish("end", ("a", "b"))
    )
    assert all(row.start == TRIM_HORIZON and row.owner is None for row in end.rows)


def test_an_end_without_children_or_with_half_of_them_waits():
    parent = lease("p", 0, 9)
    graph = ShardGraph().extended(rows=[parent])
    assert plan_end(parent, graph, {}, [parent]) is None
    half = graph.extended(child_shards=[child("a", 0, 4, "p")])
    assert plan_end(parent, half, {}, [parent]) is None
    unknown = graph.extended(rows=[lease("other", finish=Finish("end", ("a",))), lease("a", waits_for=("p",))])
    assert plan_end(parent, unknown, {}, [parent]) is None


def test_children_of_a_shard_with_unknown_hash_keys_are_accepted_as_listed():
    parent = lease("p")
    graph = ShardGraph().extended(child_shards=[child("a", 0, 4, "p")])
    assert plan_end(parent, graph, None, [parent]).finish == Finish("end", ("a",))


def test_a_child_that_the_other_finisher_has_made_is_not_made_again():
    parents = [lease("p", 0, 4), lease("q", 5, 9)]
    made = lease("c", 0, 9, waits_for=("p", "q"))
    graph = ShardGraph().extended(child_shards=[child("c", 0, 9, "p", "q")], rows=[*parents, made])
    assert plan_end(parents[0], graph, None, [*parents, made]) == ShardEnd((), Finish("end", ("c",)))


def test_a_merged_child_waits_for_a_parent_that_has_no_row_yet():
    """g is still being read; it was split into q and r, and q was merged with p. p ends first."""
    p, g = lease("p", 0, 9), lease("g", 10, 29)
    listing = [
        shard("p", 0, 9), shard("g", 10, 29), shard("q", 10, 19, "g"), shard("r", 20, 29, "g"),
        shard("c", 0, 19, "p", "q"),
    ]  # fmt: skip
    told = ShardGraph().extended(child_shards=[child("c", 0, 19, "p", "q")], rows=[p, g])
    assert plan_end(p, told, None, [p, g]) is None, "who q is must be listed first"
    graph = told.extended(shards=listing)
    end = plan_end(p, graph, {each.shard_id: each for each in listing}, [p, g])
    assert end.rows == (
        lease("q", 10, 19, waits_for=("g",)),
        lease("c", 0, 19, waits_for=("g", "p", "q")),
    )


def test_a_merged_child_does_not_bring_back_what_lies_behind_or_before_the_origin():
    p, r = lease("p", 0, 9), lease("r", 20, 29)
    listing = [
        shard("g", 10, 29), shard("q", 10, 19, "g"), shard("r", 20, 29, "g"), shard("c", 0, 19, "p", "q"),
    ]  # fmt: skip
    graph = ShardGraph().extended(shards=listing, rows=[p, r])
    scope = {each.shard_id: each for each in listing}
    end = plan_end(p, graph, scope, [p, r])
    assert [row.key.shard_id for row in end.rows] == ["q", "c"], "g is behind r; q is an orphan, and is read first"
    del scope["q"]
    end = plan_end(p, graph, scope, [p, r])
    assert end.rows == (lease("c", 0, 19, waits_for=("p",)),), "q is gone: there is nothing to wait for"


def test_a_child_waits_for_an_old_lease_whose_line_was_trimmed_out_of_sight():
    p, old = lease("p", 0, 9), lease("a", 10, 14)
    listing = [shard("c", 0, 19, "p", "trimmed")]
    graph = ShardGraph().extended(shards=listing, rows=[p, old])
    end = plan_end(p, graph, {"c": listing[0]}, [p, old])
    assert end.rows == (lease("c", 0, 19, waits_for=("a", "p")),)


def test_a_child_does_not_wait_for_a_later_shard_even_if_the_lineage_between_them_is_not_listed():
    p, stray = lease("p", 0, 9), lease("shardId-000000000007", 0, 4)
    listing = [shard("shardId-000000000004", 0, 9, "p")]
    graph = ShardGraph().extended(shards=listing, rows=[p, stray])
    end = plan_end(p, graph, {listing[0].shard_id: listing[0]}, [p, stray])
    assert end.rows == (lease("shardId-000000000004", 0, 9, waits_for=("p",)),)


# a shard that is gone
def test_the_heirs_of_a_trimmed_shard_wait_for_it_and_start_at_their_beginning():
    p = replace(lease("p", 0, 9), start=STREAM.origin)
    listing = [shard("r", 0, 4, "q"), shard("s", 5, 9, "q"), shard("t", 0, 2, "r")]
    graph = ShardGraph().extended(shards=listing, rows=[p])
    end = plan_trimmed(STREAM, p, graph, {each.shard_id: each for each in listing}, [p])
    unread = Checkpoint(seen_through_seconds=STREAM.created_seconds)
    assert end == ShardEnd(
        (lease("r", 0, 4, waits_for=("p",), checkpoint=unread), lease("s", 5, 9, waits_for=("p",), checkpoint=unread)),
        Finish("trimmed", ("r", "s")),
    )


def test_children_of_a_trimmed_shard_that_have_rows_stay_its_children():
    p, a = lease("p", 0, 9), lease("a", 0, 9, waits_for=("p",))
    graph = ShardGraph().extended(rows=[p, a])
    assert plan_trimmed(STREAM, p, graph, {}, [p, a]) == ShardEnd((), Finish("trimmed", ("a",)))


def test_a_shard_is_trimmed_only_in_the_stream_that_it_was_in():
    same = StreamSummary(
        name="s", arn="arn:stream", status="ACTIVE", created_seconds=100.4, retention_hours=24, open_shard_count=1
    )
    assert classify_missing_shard(STREAM, same) == "trimmed"
    assert classify_missing_shard(STREAM, None) == "stream_deleted"
    assert classify_missing_shard(STREAM, replace(same, status="DELETING")) == "stream_deleted"
    assert classify_missing_shard(STREAM, replace(same, created_seconds=101.0)) == "stream_recreated"
    assert classify_missing_shard(STREAM, replace(same, arn="arn:other")) == "stream_recreated"


def test_children_inherit_the_time_up_to_which_their_parent_was_read_and_other_new_rows_have_no_time():
    p, g = lease("p", 0, 9), lease("g", 10, 29)
    listing = [
        shard("p", 0, 9), shard("g", 10, 29), shard("q", 10, 19, "g"), shard("r", 20, 29, "g"),
        shard("c", 0, 19, "p", "q"),
    ]  # fmt: skip
    graph = ShardGraph().extended(shards=listing, rows=[p, g])
    end = plan_end(p, graph, {each.shard_id: each for each in listing}, [p, g], 1_000.0)
    assert [(row.key.shard_id, row.checkpoint.seen_through_seconds) for row in end.rows] == [
        ("q", None),
        ("c", 1_000.0),
    ]


def test_a_shard_that_is_listed_late_counts_as_unread_although_later_shards_were_read():
    """0 and 1 were merged into 2, which was split into 3 and 4. 0 was trimmed, 3 is its heir and has been read."""
    ids = [f"shardId-00000000000{number}" for number in range(5)]
    p, q, child_id, heir_id, _ = ids
    rows = [
        lease(p, 0, 9, finish=Finish("trimmed", (heir_id,)), checkpoint=Checkpoint(seen_through_seconds=16.0)),
        lease(q, 10, 19),
        lease(heir_id, 0, 9, waits_for=(p,), checkpoint=Checkpoint(seen_through_seconds=9_000.0)),
    ]
    graph = ShardGraph().extended(child_shards=[child(child_id, 0, 19, p, q)], rows=rows)
    end = plan_end(rows[1], graph, {}, rows, 17.0)
    assert [(row.key.shard_id, row.checkpoint.seen_through_seconds) for row in end.rows] == [(child_id, 17.0)]


def test_a_stray_follows_no_row_of_a_shard_that_came_after_it():
    older, stray, younger = (f"shardId-00000000000{number}" for number in (1, 4, 7))
    rows = [
        lease(older, 0, 9, finish=Finish("trimmed"), checkpoint=Checkpoint(seen_through_seconds=1_000.0)),
        lease(younger, 0, 4, finish=Finish("trimmed"), checkpoint=Checkpoint(seen_through_seconds=2_000.0)),
    ]
    scope = {stray: shard(stray, 0, 9, "x")}
    graph = ShardGraph().extended(shards=scope.values(), rows=rows)
    (made,) = missing_leases(STREAM, graph, scope, rows)
    assert made == lease(stray, 0, 9, waits_for=(older,), checkpoint=Checkpoint(seen_through_seconds=1_000.0))


@pytest.mark.parametrize("read_through, since", [(1_000.0, 1_000.0), (None, STREAM.created_seconds)])
def test_heirs_inherit_the_time_up_to_which_the_trimmed_shard_was_read(read_through, since):
    p = lease("p", 0, 9)
    graph = ShardGraph().extended(shards=[shard("r", 0, 9, "q")], rows=[p])
    end = plan_trimmed(STREAM, p, graph, {"r": shard("r", 0, 9, "q")}, [p], read_through)
    assert [row.checkpoint for row in end.rows] == [Checkpoint(seen_through_seconds=since)]


def test_an_heir_of_two_trimmed_shards_inherits_the_earlier_time():
    left = Checkpoint(seen_through_seconds=500.0)
    p, q = lease("p", 0, 9), lease("q", 10, 19, finish=Finish("trimmed"), checkpoint=left)
    graph = ShardGraph().extended(shards=[shard("t", 0, 19, "r", "s")], rows=[p, q])
    end = plan_trimmed(STREAM, p, graph, {"t": shard("t", 0, 19, "r", "s")}, [p, q], 1_000.0)
    assert end.rows == (lease("t", 0, 19, waits_for=("p", "q"), checkpoint=left),)


def test_a_stray_whose_line_was_trimmed_out_of_sight_follows_the_rows_that_have_its_hash_keys():
    seen = Checkpoint(seen_through_seconds=1_000.0)
    rows = [
        lease("a", 0, 4, finish=Finish("trimmed"), checkpoint=seen),
        lease("b", 5, 9, finish=Finish("trimmed"), checkpoint=Checkpoint(seen_through_seconds=1_500.0)),
        lease("c", 10, 19, finish=Finish("trimmed"), checkpoint=Checkpoint(seen_through_seconds=2_000.0)),
    ]
    scope = {"s": shard("s", 0, 9, "x", "y")}
    graph = ShardGraph().extended(shards=scope.values(), rows=rows)
    (made,) = missing_leases(STREAM, graph, scope, rows)
    assert made == lease("s", 0, 9, waits_for=("a", "b"), checkpoint=seen)


def test_a_child_follows_those_that_were_trimmed_before_its_line_was_known():
    rows = [
        lease("a", 0, 4),
        lease("b", 5, 9, finish=Finish("trimmed")),
        lease("g", 0, 9, finish=Finish("end", ("a", "b"))),
        lease("z", 10, 19, finish=Finish("trimmed")),
    ]
    graph = ShardGraph().extended(child_shards=[child("c", 0, 9, "a", "x")], rows=rows)
    end = plan_end(rows[0], graph, {}, rows)
    assert [(row.key, row.waits_for) for row in end.rows] == [(key("c"), ("a", "b"))]
