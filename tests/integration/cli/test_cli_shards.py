"""`anabranch shards` and `anabranch which-shard`."""

import hashlib
import io

SHARD = "shardId-00000000000"
HALF = 1 << 127


def test_the_tree_shows_a_merge_once_and_names_it_under_its_other_parent(server, cli):
    server.call("MergeShards", StreamName="orders", ShardToMerge=f"{SHARD}0", AdjacentShardToMerge=f"{SHARD}1")
    shown = cli("shards", "orders")
    assert shown.code == 0
    title, heading, first, child, second, again = shown.out.splitlines()
    assert title == "orders: ACTIVE, 1 open of 3 shards"
    assert heading.split() == ["SHARD", "HASH", "RANGE", "SHARE", "STATE"]
    assert first.split() == [f"{SHARD}0", "█" * 24 + "·" * 24, "50.0%", "closed"]
    assert child.split() == [f"└─{SHARD}2", "█" * 48, "100.0%", "open"]
    assert second.split() == [f"{SHARD}1", "·" * 24 + "█" * 24, "50.0%", "closed"]
    assert again.split() == [f"└─{SHARD}2", "above,", "under", f"{SHARD}0"]
    only_open = cli("shards", "orders", "--open").out
    assert "1 open of 3 shards" in only_open
    assert f"{SHARD}0" not in only_open


def test_json_has_whole_numbers_as_text_and_no_sum(server, cli):
    first, second = cli("shards", "orders", "--json").json
    assert first["ending_hash_key"] == str(HALF - 1)
    assert second["starting_hash_key"] == str(HALF)
    assert first["parent_shard_ids"] == []
    assert first["is_open"] is True
    assert first["ending_sequence_number"] is None


def test_a_key_goes_where_its_hash_says(server, cli):
    digest = int.from_bytes(hashlib.md5(b"user-1").digest())
    expected = f"{SHARD}{int(digest >= HALF)}"
    assert cli("which-shard", "orders", "user-1").out.splitlines()[1].split() == ["user-1", expected, str(digest)]
    (found,) = cli("which-shard", "orders", "--explicit-hash-key", str(HALF), "--json").json
    assert found == {"partition_key": None, "hash_key": str(HALF), "shard_id": f"{SHARD}1"}


def test_keys_are_read_from_standard_input(server, cli, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO("a\r\nmüller\n".encode()), encoding="utf-8"))
    found = cli("which-shard", "orders", "-", "--json").json
    assert [key["partition_key"] for key in found] == ["a", "müller"]
    for given, said in (
        (b"a\n\nb\n", "line 2 of standard input: a partition key has 1 to 256"),
        (b"\xff\n", "not UTF-8"),
    ):
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(given), encoding="utf-8"))
        ended = cli("which-shard", "orders", "-")
        assert ended.code == 2
        assert said in ended.err


def test_a_key_may_begin_with_a_dash_after_two_of_them(server, cli):
    assert cli("which-shard", "orders", "--", "-key").out.splitlines()[1].startswith("-key")


def test_a_stream_that_distributes_by_itself_is_reported(server, cli):
    server.call(
        "CreateStream",
        StreamName="clicks",
        StreamModeDetails={"StreamMode": "ON_DEMAND"},
        RecordDistributionStrategy="AUTO",
    )
    assert "a key may go to any shard" in cli("which-shard", "clicks", "a").err


def test_wrong_keys_and_numbers_end_with_two(server, cli):
    for arguments, said in (
        (("which-shard", "orders"), "pass partition keys or one --explicit-hash-key"),
        (("which-shard", "orders", "a", "--explicit-hash-key", "1"), "pass partition keys or one"),
        (("which-shard", "orders", "--explicit-hash-key", str(1 << 128)), "from 0 to 2**128 - 1"),
        (("which-shard", "orders", "x" * 257), "1 to 256 characters"),
        (("shards",), "required: STREAM"),
        (("shards", "arn:aws:sqs:eu-west-1:123456789012:orders"), "a stream's ARN looks like"),
    ):
        ended = cli(*arguments)
        assert (ended.code, ended.out) == (2, ""), arguments
        assert said in ended.err, arguments
