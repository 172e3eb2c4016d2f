"""`anabranch tail` against a local Kinesis: from where to where, which records, in which shape."""

import json
import os
import signal
import subprocess
import sys
import threading

import pytest

from patience import PATIENCE

PROGRAM = (sys.executable, "-m", "anabranch")
ALL = ("--from", "horizon", "--no-follow")


def put(server, *keys, stream="orders", first=0):
    for number, key in enumerate(keys, first):
        server.call("PutRecord", StreamName=stream, PartitionKey=key, Data=str(number).encode())


def test_a_whole_stream_is_shown_with_each_key_in_order(server, cli):
    put(server, *["a", "b", "c"] * 5)
    ended = cli("tail", "orders", *ALL, "--format", "%k %s")
    assert (ended.code, ended.err) == (0, "")
    pairs = [line.split() for line in ended.out.splitlines()]
    for key, start in (("a", 0), ("b", 1), ("c", 2)):
        assert [int(number) for name, number in pairs if name == key] == list(range(start, 15, 3))


def test_aggregates_are_opened_and_resharding_is_followed(server, cli):
    lines = "".join(json.dumps({"user": f"user-{n % 5}", "n": n}) + "\n" for n in range(50))
    read, write = os.pipe()
    os.write(write, lines.encode())
    os.close(write)
    subprocess.run([*PROGRAM, "put", "orders", "--key-field", "user", "--quiet"], stdin=read, check=True, timeout=30,
                   stderr=subprocess.DEVNULL)  # fmt: skip
    os.close(read)
    server.call("SplitShard", StreamName="orders", ShardToSplit="shardId-000000000000", NewStartingHashKey="1000")
    server.call("PutRecord", StreamName="orders", PartitionKey="user-0", ExplicitHashKey="0", Data=b"after the split")
    documents = [json.loads(line) for line in cli("tail", "orders", *ALL, "--json").out.splitlines()]
    assert len(documents) == 51
    (child_at,) = [at for at, one in enumerate(documents) if one["data"] == "after the split"]
    parent_at = [at for at, one in enumerate(documents) if one["shard_id"] == "shardId-000000000000"]
    assert parent_at
    assert max(parent_at) < child_at  # other shards may still be read
    numbers = [json.loads(one["data"])["n"] for one in documents[:-1] if one["partition_key"] == "user-3"]
    assert numbers == list(range(3, 50, 5))
    assert any(one["sub_sequence_number"] == 0 for one in documents)


def test_what_is_shown_can_be_narrowed_to_a_key_a_shard_and_a_number(server, cli):
    put(server, *["a", "b", "c", "d"] * 3)
    assert cli("tail", "orders", *ALL, "--key", "b", "--format", "%s").out.split() == ["1", "5", "9"]
    shards = set(cli("tail", "orders", *ALL, "--shard", "1", "--format", "%p").out.split())
    assert shards == {"shardId-000000000001"}
    assert cli("tail", "orders", "--from", "horizon", "--key", "a", "-n", "2", "--format", "%s").out.split() == [
        "0",
        "4",
    ]


def test_times_bound_what_is_shown(server, cli):
    put(server, "a", "a")
    assert cli("tail", "orders", "--from", "-15m", "--to", "now", "--format", "%s").out.split() == ["0", "1"]
    assert cli("tail", "orders", "--from", "-15m", "--to", "-5m").out == ""


def test_a_record_has_all_its_fields_as_json(server, cli):
    server.call("PutRecord", StreamName="returns", PartitionKey="k", Data=b"\xff\x00")
    (line,) = cli("tail", "returns", *ALL, "--json").out.splitlines()
    document = json.loads(line)
    assert len(document.pop("sequence_number")) > 50
    assert document.pop("approximate_arrival_timestamp").endswith("Z")
    assert document == {
        "stream": "returns",
        "shard_id": "shardId-000000000000",
        "sub_sequence_number": None,
        "partition_key": "k",
        "explicit_hash_key": None,
        "data": None,
        "data_base64": "/wA=",
    }


def test_it_follows_the_stream_until_ctrl_c(server):
    process = subprocess.Popen(
        [*PROGRAM, "tail", "orders", "--format", "%s"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    stop = threading.Event()

    def write():
        number = 0
        while not stop.wait(0.05):
            put(server, "a", first=number)
            number += 1

    writer = threading.Thread(target=write)
    writer.start()
    try:
        shown = [int(process.stdout.readline()) for _ in range(5)]
        assert shown == list(range(shown[0], shown[0] + 5))
        process.send_signal(signal.SIGINT)
        assert process.wait(PATIENCE) == 130
        assert process.stderr.read() == b""
    finally:
        stop.set()
        writer.join()
        process.kill()
        process.communicate()


@pytest.mark.parametrize(
    "words, code, advice",
    [
        (("tail", "ordrs"), 1, "did you mean 'orders'?"),
        (("tail", "orders", "--from", "yesterday"), 2, "'yesterday' is not a time: write horizon, latest, -15m"),
        (("tail", "orders", "--from", "2999-01-01"), 2, "is in the future; omit it to start now"),
        (("tail", "orders", "--from", "-1h", "--to", "2999-01-01"), 2, "is in the future; omit it"),
        (("tail", "orders", "--from", "-5m", "--to", "-15m"), 2, "--to must be after --from"),
        (("tail", "orders", "--to", "now"), 2, "--to needs --from"),
        (("tail", "orders", "--to", "now", "--no-follow"), 2, "not allowed with argument"),
        (("tail", "orders", "-n", "0"), 2, "is not a whole number above 0"),
        (("tail", "orders", "--format", "%T %q"), 2, "'%q' is not a placeholder; use %%"),
        (("tail", "orders", "--shard", "9"), 1, "orders has no shardId-000000000009"),
    ],
)
def test_mistakes_are_answered_with_what_would_be_right(server, cli, words, code, advice):
    ended = cli(*words)
    assert (ended.code, ended.out) == (code, "")
    assert advice in ended.err


def test_a_closed_shard_is_not_waited_for(server, cli):
    server.call("MergeShards", StreamName="orders", ShardToMerge="shardId-000000000000",
                AdjacentShardToMerge="shardId-000000000001")  # fmt: skip
    ended = cli("tail", "orders", "--shard", "0")
    assert ended.code == 1
    assert "shardId-000000000000 is closed and gets no new records; --from horizon shows" in ended.err
