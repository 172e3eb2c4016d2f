"""`anabranch put`: one record, lines, keys by field, what fails, and Ctrl-C."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from contextlib import contextmanager

import anabranch._cli.put
from anabranch._wire.aggregate import open_aggregate
from patience import PATIENCE


@contextmanager
def standard_input(monkeypatch, data, tmp_path):
    path = tmp_path / "input"
    path.write_bytes(data)
    with path.open() as file:
        monkeypatch.setattr("sys.stdin", file)
        yield


def read(server, shard_id, stream="orders"):
    iterator = server.call("GetShardIterator", StreamName=stream, ShardId=shard_id, ShardIteratorType="TRIM_HORIZON")[
        "ShardIterator"
    ]
    records = server.call("GetRecords", ShardIterator=iterator)["Records"]
    return [(record.partition_key, record.data) for record in records]


def test_one_record_is_written_and_its_place_printed(server, cli):
    ended = cli("put", "returns", "grüße", "--key", "user-1")
    assert ended.code == 0
    shard_id, sequence_number, key = ended.out.split()
    assert (shard_id, key) == ("shardId-000000000000", "user-1")
    assert sequence_number.isdigit()
    assert ended.err.startswith("1 record written to 1 shard in ")
    assert read(server, shard_id, "returns") == [("user-1", "grüße".encode())]


def test_an_explicit_hash_key_decides_the_shard(server, cli):
    for hash_key, shard_id in (("0", "shardId-000000000000"), (str((1 << 128) - 1), "shardId-000000000001")):
        assert cli("put", "orders", "x", "--key", "k", "--explicit-hash-key", hash_key).out.startswith(shard_id)


def test_lines_are_json_with_the_key_in_a_field_and_bad_ones_are_named(server, cli, monkeypatch, tmp_path):
    good = [b'{"user": {"id": 7}}', b"", b'{"user": {"id": "b"}}\r']
    lines = [*good, b"nonsense", b'{"user": 1}', b'{"user": {"id": []}}']
    with standard_input(monkeypatch, b"\n".join(lines), tmp_path):
        ended = cli("put", "orders", "--key-field", "user.id", "--no-aggregate", "--json")
    assert ended.code == 1
    written = [json.loads(line) for line in ended.out.splitlines()]
    assert [(record["partition_key"], record["delivered"]) for record in written] == [("7", True), ("b", True)]
    assert written[0]["sub_sequence_number"] is None
    assert "line 4 was not written: not JSON" in ended.err
    assert "line 5 was not written: it has no field 'user.id'" in ended.err
    assert "line 6 was not written: its field 'user.id' is neither text nor a number" in ended.err
    assert "2 records written to" in ended.err
    assert "3 failed" in ended.err
    records = [record for shard_id in server.open_shard_ids() for record in read(server, shard_id)]
    assert sorted(records) == [("7", lines[0]), ("b", lines[2].rstrip(b"\r"))]


def test_many_lines_are_aggregated_and_kept_in_order(server, cli, monkeypatch, tmp_path):
    monkeypatch.setattr(anabranch._cli.put, "_PENDING_MAX", 100)
    lines = [f"line {number}".encode() for number in range(5000)]
    with standard_input(monkeypatch, b"\n".join(lines) + b"\n", tmp_path):
        ended = cli("put", "returns", "-", "--key", "k", "--quiet")
    assert (ended.code, ended.out) == (0, "")
    stored = [data for _, data in read(server, "shardId-000000000000", "returns")]
    assert len(stored) < 1000
    assert [line for data in stored for line in opened(data)] == lines


def opened(data):
    aggregate = open_aggregate(data)
    return [data] if aggregate is None else [sub_record[2] for sub_record in aggregate.sub_records()]


def test_a_rate_holds_records_back(monkeypatch):
    waited = []

    async def sleep(seconds):
        waited.append(seconds)

    monkeypatch.setattr("anabranch._cli.put.asyncio.sleep", sleep)
    pace = anabranch._cli.put._Pace(10.0)

    async def main():
        for _ in range(21):
            await pace.wait()

    asyncio.run(main())
    assert len(waited) == 20
    assert 1.9 < waited[-1] <= 2.0


def test_a_record_that_the_stream_refuses_is_reported_once_and_the_rest_continues(server, cli, monkeypatch, tmp_path):
    lines = b'{"k": "a", "x": "%b"}\n{"k": "b"}\n' % (b"x" * 1_100_000)
    with standard_input(monkeypatch, lines, tmp_path):
        ended = cli("put", "orders", "--key-field", "k")
    assert ended.code == 1
    assert ended.out.split()[2] == "b"
    assert "line 1, with partition key 'a', was not written: InvalidArgumentException" in ended.err
    assert len(ended.err.splitlines()) == 2


def test_a_line_longer_than_any_record_is_refused(server, cli, monkeypatch, tmp_path):
    with standard_input(monkeypatch, b"x" * 11_000_000, tmp_path):
        ended = cli("put", "orders", "--key", "k")
    assert ended.code == 2
    assert "a line of standard input is longer than 10485760 bytes" in ended.err


def test_wrong_usage_and_a_missing_stream_are_reported_before_anything_is_read(server, cli):
    for arguments, code, said in (
        (("put", "orders", "x"), 2, "one of the arguments --key --key-field is required"),
        (("put", "orders", "x", "--key", ""), 2, "a partition key has 1 to 256 characters"),
        (
            ("put", "orders", "x", "--key", "k", "--rate", "0"),
            2,
            "is not a number of records per second from 0.001 to 100000",
        ),
        (("put", "ordrs", "--key", "k"), 1, "did you mean 'orders'?"),
    ):
        ended = cli(*arguments)
        assert (ended.code, ended.out) == (code, ""), arguments
        assert said in ended.err, arguments


def test_ctrl_c_delivers_what_was_read_and_leaves_at_once(server):
    process = subprocess.Popen(
        [sys.executable, "-m", "anabranch", "put", "returns", "--key", "k", "--no-aggregate"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=dict(os.environ),
    )
    try:
        process.stdin.write(b"first\nsecond\n")
        process.stdin.flush()
        shown = [process.stdout.readline() for _ in range(2)]  # before standard input has ended
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=PATIENCE)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 130
    assert all(line.startswith(b"shardId-000000000000  ") for line in shown)
    assert out == b""
    assert err.decode().startswith("2 records written to 1 shard in ")
    assert "Traceback" not in err.decode()


def test_there_is_a_hint_for_a_person_at_a_terminal(server, cli, monkeypatch, tmp_path):
    master, slave = os.openpty()
    os.write(master, b"typed\n\x04")
    with os.fdopen(slave) as terminal:
        monkeypatch.setattr("sys.stdin", terminal)
        ended = cli("put", "returns", "--key", "k")
    os.close(master)
    assert ended.code == 0
    assert ended.err.startswith("one record per line; Ctrl-D ends the input\n1 record written")
