"""The drawing of lineage: every shard once, in a tree that may have thousands; bars that meet and are never empty."""

from anabranch._cli.shards import lineage, range_bar, share
from anabranch._model.hash_keys import HashKeyRange, even_ranges
from anabranch._model.streams import Shard
from anabranch.limits import HASH_KEY_MAX

WHOLE = HashKeyRange(0, HASH_KEY_MAX)


def shard(shard_id, hash_key_range=WHOLE, parent=None, adjacent=None):
    return Shard(
        shard_id=shard_id,
        hash_key_range=hash_key_range,
        starting_sequence_number=1,
        parent_shard_id=parent,
        adjacent_parent_shard_id=adjacent,
    )


def drawn(shards):
    return [row.guides + row.shard.shard_id + ("*" if row.is_repeated else "") for row in lineage(shards)]


def test_brothers_and_their_children_hang_on_branches():
    low, high = even_ranges(2)
    first, second = even_ranges(4)[:2]
    shards = [
        shard("root"),
        shard("high", high, "root"),
        shard("low", low, "root"),
        shard("b", second, "low"),
        shard("a", first, "low"),
    ]
    assert drawn(shards) == ["root", "├─low", "│ ├─a", "│ └─b", "└─high"]


def test_the_child_of_a_merge_is_drawn_once_and_names_its_other_parent():
    low, high = even_ranges(2)
    shards = [shard("x", low), shard("y", high), shard("child", WHOLE, "x", "y"), shard("grand", WHOLE, "child")]
    rows = lineage(shards)
    assert drawn(shards) == ["x", "└─child", "  └─grand", "y", "└─child*"]
    assert [row.other_parent for row in rows] == [None, "y", None, None, "x"]


def test_a_shard_whose_parents_left_the_stream_is_a_root():
    assert drawn([shard("child", WHOLE, "gone"), shard("grand", WHOLE, "child")]) == ["child", "└─grand"]


def test_a_shard_with_one_missing_parent_is_drawn_under_the_other():
    rows = lineage([shard("y"), shard("child", WHOLE, "gone", "y")])
    assert [(row.guides, row.other_parent) for row in rows] == [("", None), ("└─", "gone")]


def test_a_very_long_line_of_descent_is_drawn():
    shards = [shard("0")] + [shard(str(n), WHOLE, str(n - 1)) for n in range(1, 3000)]
    assert len(lineage(shards)) == 3000


def test_the_bars_of_neighbours_cover_the_space_once():
    bars = [range_bar(part, 40) for part in even_ranges(7)]
    assert all(sum(bar[cell] == "█" for bar in bars) == 1 for cell in range(40))


def test_the_smallest_range_is_seen_everywhere():
    for key in (0, HASH_KEY_MAX // 2, HASH_KEY_MAX):
        bar = range_bar(HashKeyRange(key, key), 10)
        assert len(bar) == 10
        assert bar.count("█") == 1


def test_shares_are_percentages():
    assert share(WHOLE) == "100.0%"
    assert share(even_ranges(3)[0]) == "33.3%"
    assert share(HashKeyRange(0, 0)) == "<0.1%"
