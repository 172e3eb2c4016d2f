"""`anabranch reshard`: the plan, the question, the steps and the wait."""

import io

SHARD = "shardId-00000000000"


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_scaling_far_goes_in_steps_and_waits_for_each(slow_server, cli):
    while cli("streams", "describe", "orders", "--json").json["status"] != "ACTIVE":
        pass
    ended = cli("reshard", "orders", "--to", "6", "--yes")
    assert (ended.code, ended.out) == (0, "orders: ACTIVE, 6 open shards\n")
    assert "  1. UpdateShardCount 2 -> 4\n  2. UpdateShardCount 4 -> 6\n" in ended.err
    assert "step 2 of 2: ACTIVE, 6 open shards" in ended.err
    assert len(slow_server.open_shard_ids()) == 6


def test_a_split_and_a_merge_show_their_ranges_and_take_short_names(server, cli):
    split = cli("reshard", "orders", "--split", "0", "--yes", "--json")
    assert split.code == 0
    assert split.json["steps"] == [f"SplitShard {SHARD}0 at hash key {1 << 126}"]
    assert split.json["open_shard_count_before"] == 2
    assert split.json["open_shard_ids"] == [f"{SHARD}1", f"{SHARD}2", f"{SHARD}3"]
    assert f"{'  becomes':<20}  {'█' * 8}{'·' * 24}  25.0%" in split.err
    merge = cli("reshard", "orders", "--merge", f"{SHARD}3", "2", "--yes")
    assert merge.out == "orders: ACTIVE, 2 open shards\n"
    assert f"1. MergeShards {SHARD}2 and {SHARD}3" in merge.err
    uneven = cli("reshard", "orders", "--split", "1", "--at", str((1 << 127) + (1 << 120)), "--yes")
    assert uneven.code == 0
    assert "0.4%" in uneven.err


def test_nothing_is_done_where_there_is_nothing_to_do(server, cli):
    ended = cli("reshard", "orders", "--to", "2")
    assert (ended.code, ended.out) == (0, "orders: ACTIVE, 2 open shards\n")
    assert "nothing to do" in ended.err


def test_the_command_asks_and_no_is_an_answer(server, cli, monkeypatch):
    for answer, code, count in (("n\n", 1, 2), ("", 1, 2), ("y\n", 0, 4)):
        monkeypatch.setattr("sys.stdin", Terminal(answer))
        ended = cli("reshard", "orders", "--to", "4")
        assert ended.code == code
        assert "Reshard now? [y/N]" in ended.err
        assert len(server.open_shard_ids()) == count
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n"))
    unasked = cli("reshard", "orders", "--to", "8")
    assert unasked.code == 2
    assert "pass --yes" in unasked.err


def test_an_impossible_reshard_is_refused_with_advice(server, cli):
    cli("reshard", "orders", "--to", "4", "--yes")
    first, second, third, _ = server.open_shard_ids()
    for arguments, said in (
        (("--split", "99"), f"there is no shardId-000000000099; the open shards are {first}, {second}"),
        (("--split", "0"), f"{SHARD}0 is closed: it was split or merged before; the open shards are {first}"),
        (("--split", first, "--at", "0"), "give a hash key above 1 and below"),
        (("--merge", first, third), f"are not adjacent: {first} can be merged with {second}"),
        (("--merge", first, first), "a merge needs two different shards"),
        (("--merge", first), "expected 2 arguments"),
        (("--to", "4", "--at", "1"), "--at needs --split"),
        (("--to", "9999"), "takes 12 calls, and AWS allows 10 in 24 hours: scale to 4096 first"),
        (("--split", "first"), "a shard id looks like shardId-000000000042, not 'first'; its number alone is enough"),
        ((), "one of the arguments --to --split --merge is required"),
    ):
        ended = cli("reshard", "orders", "--yes", *arguments)
        assert (ended.code, ended.out) == (2, ""), arguments
        assert said in ended.err, arguments


def test_a_stream_that_is_changing_is_left_alone(frozen_server, cli):
    refused = cli("reshard", "orders", "--to", "4", "--yes")
    assert refused.code == 1
    assert "orders is CREATING: wait until it is ACTIVE" in refused.err


def test_on_demand_streams_are_left_alone(server, cli):
    cli("streams", "create", "clicks")
    refused = cli("reshard", "clicks", "--to", "8", "--yes")
    assert refused.code == 1
    assert "clicks is on-demand" in refused.err
