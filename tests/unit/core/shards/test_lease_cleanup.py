"""The cases of KCL's LeaseCleanupManagerTest, by our rule: rows go from the oldest on, and only once proved gone."""

import pytest

from anabranch._core.shards.graph import ShardGraph
from anabranch._core.shards.lifecycle import removable
from anabranch._model.hash_keys import HashKeyRange
from anabranch._model.leases import Checkpoint, Finish, LeaseKey, LeaseRow
from anabranch._model.streams import Position, at_timestamp

BEGUN = Checkpoint(Position(5))


def row(name, **fields):
    return LeaseRow(key=LeaseKey("s", 0, name), **fields)


def finished(name, *children, **fields):
    return row(name, finish=Finish("end", children), **fields)


def trimmed(name, *children, **fields):
    return row(name, finish=Finish("trimmed", children), **fields)


LOW, HIGH, ALL = HashKeyRange(0, 4), HashKeyRange(5, 9), HashKeyRange(0, 9)


@pytest.mark.parametrize(
    "situation, rows, expected",
    [
        (
            "a split whose children have begun",
            [finished("p", "a", "b"), *(row(c, checkpoint=BEGUN) for c in "ab")],
            ["p"],
        ),
        (
            "a merge whose child has begun",
            [finished("p", "c"), finished("q", "c"), row("c", checkpoint=BEGUN)],
            ["p", "q"],
        ),
        ("a child that finished without a position", [finished("p", "a"), finished("a")], ["p"]),
        ("a child still at its beginning", [finished("p", "a"), row("a")], []),
        ("a child still at its time", [finished("p", "a"), row("a", start=at_timestamp(5.0))], []),
        ("one child has lost its row", [finished("p", "a", "b"), row("a", checkpoint=BEGUN)], []),
        ("a parent is left above", [finished("g", "p", "x"), finished("p", "a"), row("a", checkpoint=BEGUN)], []),
        ("not finished", [row("p", checkpoint=BEGUN)], []),
        ("trimmed, with hash keys that are unknown", [trimmed("p")], ["p"]),
        ("trimmed, and nothing has its hash keys yet", [trimmed("p", hash_key_range=ALL)], []),
        (
            "trimmed, and a part of its hash keys is still another's to make",
            [trimmed("p", "a", hash_key_range=ALL), row("a", checkpoint=BEGUN, hash_key_range=LOW)],
            [],
        ),
        (
            "trimmed, and a stray that follows it has not begun",
            [trimmed("p", hash_key_range=LOW), row("s", waits_for=("p",), hash_key_range=ALL)],
            [],
        ),
        (
            "trimmed, and an heir and a stray that follow it have begun",
            [
                trimmed("p", "a", hash_key_range=ALL),
                row("a", checkpoint=BEGUN, hash_key_range=LOW),
                row("s", waits_for=("p",), checkpoint=BEGUN, hash_key_range=HIGH),
            ],
            ["p"],
        ),
        ("nothing", [], []),
    ],
)
def test_which_rows_can_be_deleted(situation, rows, expected):
    found = removable(rows, ShardGraph(), listed_now=())
    assert [each.key.shard_id for each in found] == expected


def test_a_shard_that_is_still_listed_keeps_its_row():
    rows = [finished("p", "a"), row("a", checkpoint=BEGUN)]
    assert removable(rows, ShardGraph(), listed_now={"p", "a"}) == ()
