import pytest

from anabranch._core.shards.graph import ShardGraph, ancestors_by_keys, descendants_of_unfinished
from anabranch._model.hash_keys import HashKeyRange
from anabranch._model.leases import Finish, LeaseKey, LeaseRow
from anabranch._model.streams import Shard
from anabranch._wire.messages import ChildShard
from anabranch.errors import StreamRecreatedError


def shard(name, start, end, *parents, closed=None):
    return Shard(
        shard_id=name,
        hash_key_range=HashKeyRange(start, end),
        starting_sequence_number=1,
        ending_sequence_number=closed,
        parent_shard_id=parents[0] if parents else None,
        adjacent_parent_shard_id=parents[1] if len(parents) > 1 else None,
    )


def lease(name, **fields):
    return LeaseRow(key=LeaseKey("s", 0, name), **fields)


def test_a_graph_merges_listings_child_shards_and_rows_and_forgets_nothing():
    graph = ShardGraph().extended(shards=[shard("p", 0, 9, closed=5), shard("q", 10, 19)])
    graph = graph.extended(shards=[shard("p", 0, 9), shard("q", 10, 19, closed=7)])
    graph = graph.extended(child_shards=[ChildShard("c", ("p", "q"), HashKeyRange(0, 19))])
    graph = graph.extended(rows=[lease("c", waits_for=("p",), finish=Finish("end", ("d",))), lease("e")])
    assert not graph.listed["p"].is_open, "a page from an older instant does not open a closed shard again"
    assert not graph.listed["q"].is_open
    assert "c" not in graph.listed
    assert graph.children("p") == graph.children("q") == ("c",)
    assert graph.parents("c") == ("p", "q")
    assert graph.children("c") == ("d",)
    assert graph.hash_key_range("c") == HashKeyRange(0, 19)
    assert graph.hash_key_range("d") is None
    assert list(graph.descendants(["p"])) == ["c", "d"]
    assert set(graph.ancestors(["d"])) == {"c", "p", "q"}
    assert graph.parents("unknown") == graph.children("unknown") == ()


def test_a_shard_whose_hash_keys_changed_is_of_another_stream():
    graph = ShardGraph().extended(shards=[shard("p", 0, 9)])
    with pytest.raises(StreamRecreatedError, match="p held the hash keys 0 to 9 and now holds 0 to 8"):
        graph.extended(shards=[shard("p", 0, 8)])


def ancestors(graph, shard_id, *rows):
    return [row.key.shard_id for row in ancestors_by_keys(graph, shard_id, rows)]


def test_the_hash_keys_show_a_lineage_that_no_listing_names():
    graph = ShardGraph().extended(shards=[shard("young", 5, 14, "trimmed"), shard("child", 5, 9, "young")])
    old = lease("old", hash_key_range=HashKeyRange(0, 9))
    assert ancestors(graph, "young", old) == ["old"]
    assert ancestors(graph, "trimmed", old) == []
    assert ancestors(graph, "young", lease("beside", hash_key_range=HashKeyRange(15, 19))) == []
    assert ancestors(graph, "young", lease("unknown")) == []
    child = lease("child", hash_key_range=HashKeyRange(5, 9))
    assert ancestors(graph, "young", child) == [], "a descendant is no ancestor"
    assert list(descendants_of_unfinished(graph, ["young", "child"], [old])) == ["young", "child"]
    finished = lease("old", hash_key_range=HashKeyRange(0, 9), finish=Finish("end"))
    assert not descendants_of_unfinished(graph, ["young", "child"], [finished])
    assert list(descendants_of_unfinished(graph, ["child"], [lease("young")])) == ["child"]
