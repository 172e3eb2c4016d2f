"""`anabranch serve` as a real process: ready line, signals, programs run inside it, and data that survives kill -9."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import urllib.request
from contextlib import contextmanager, suppress

import boto3
import botocore.config
import botocore.exceptions
import pytest

from patience import PATIENCE

SERVE = [sys.executable, "-c", "import sys; from anabranch._cli import main; sys.exit(main())", "serve"]
SHARD_0 = "shardId-000000000000"


@contextmanager
def serving(*options):
    process = subprocess.Popen(
        [*SERVE, "--port", "0", *options], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        process.ready = process.stdout.readline().split()
        assert process.ready[:1] == ["ready:"], process.stderr.read()
        process.url = process.ready[1]
        yield process
    finally:
        process.kill()
        process.communicate(timeout=PATIENCE)


def run(*arguments, **options):
    return subprocess.run(
        [*SERVE, *arguments], capture_output=True, text=True, timeout=PATIENCE, check=False, **options
    )


def client(url, verify=None):
    return boto3.client(
        "kinesis",
        endpoint_url=url,
        region_name="us-east-1",
        aws_access_key_id="local",
        aws_secret_access_key="local",
        verify=verify,
        config=botocore.config.Config(retries={"total_max_attempts": 1}),
    )


def read_all(kinesis, stream="orders"):
    records = []
    for shard in kinesis.list_shards(StreamName=stream)["Shards"]:
        iterator = kinesis.get_shard_iterator(
            StreamName=stream, ShardId=shard["ShardId"], ShardIteratorType="TRIM_HORIZON"
        )["ShardIterator"]
        while True:
            answer = kinesis.get_records(ShardIterator=iterator)
            records += [(record["SequenceNumber"], record["Data"]) for record in answer["Records"]]
            if not answer["Records"] or "NextShardIterator" not in answer:
                break
            iterator = answer["NextShardIterator"]
    return records


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_it_says_when_it_is_ready_and_stops_cleanly(number):
    with serving("--create", "orders:4", "--create", "returns", "--region", "eu-west-1") as process:
        assert process.ready[2:] == ["region", "eu-west-1"]
        with urllib.request.urlopen(f"{process.url}/health", timeout=PATIENCE) as response:
            assert json.load(response)["status"] == "ok"
        kinesis = client(process.url)
        assert kinesis.list_streams()["StreamNames"] == ["orders", "returns"]
        assert len(kinesis.list_shards(StreamName="orders")["Shards"]) == 4
        process.send_signal(number)
        assert process.wait(PATIENCE) == 0
        assert process.stderr.read() == ""


def test_tls_names_the_certificate_to_trust():
    with serving("--tls", "--create", "orders") as process:
        certificate = process.ready[process.ready.index("certificate") + 1]
        assert process.url.startswith("https://127.0.0.1:")
        assert client(process.url, verify=certificate).list_streams()["StreamNames"] == ["orders"]
        with pytest.raises(botocore.exceptions.SSLError):
            client(process.url).list_streams()
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE) == 0
        assert not os.path.exists(certificate)  # noqa: PTH110


@pytest.mark.parametrize("host", ["", "a..b", "x" * 300])
@pytest.mark.parametrize("options", [(), ("--tls",)])
def test_a_host_that_is_no_host_is_refused(host, options):
    done = run("--host", host, *options)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("anabranch serve: error: host: ")


PROGRAM = """
import boto3, sys
kinesis = boto3.client("kinesis")
names = kinesis.list_streams()["StreamNames"]
print(names, kinesis.meta.region_name, kinesis.meta.endpoint_url.partition(":")[0])
sys.exit(len(names) + 40)
"""


@pytest.mark.parametrize("options", [(), ("--tls",)])
def test_a_program_finds_the_server_and_its_exit_code_is_passed_on(options):
    done = run(
        "--create", "orders:2", "--create", "returns", "--region", "eu-west-1", *options, "--",
        sys.executable, "-c", PROGRAM,
        env={**os.environ, "AWS_SESSION_TOKEN": "real", "AWS_PROFILE": "missing"},
    )  # fmt: skip
    assert done.stderr == ""
    assert done.stdout.split("]") == ["['orders', 'returns'", f" eu-west-1 http{'s' if options else ''}\n"]
    assert done.returncode == 42


PATIENT = """
import signal, sys
signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))
print("up", flush=True)
signal.pause()
"""


def test_signals_go_to_the_program():
    process = subprocess.Popen([*SERVE, "--", sys.executable, "-c", PATIENT], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout.readline() == "up\n"
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE) == 7
    finally:
        process.kill()
        process.communicate()


def test_a_program_that_a_signal_ends_is_reported_as_a_shell_does():
    assert run("--", sys.executable, "-c", "import os; os.kill(os.getpid(), 9)").returncode == 128 + 9


@pytest.mark.parametrize(
    "options, said",
    [
        (("--create", "orders:none"), "NAME:SHARDS"),
        (("--create", "orders:0"), "NAME:SHARDS"),
        (("--create", "or ders"), "create: or ders with 1 shards"),
        (("--create", "orders:100000000000"), "create: orders with 100000000000 shards"),
        (("--create", "orders", "--create", "orders:2"), "more than once"),
        (("--port", "70000"), "is not a port from 0 to 65535"),
        (("--port", "x"), "is not a port from 0 to 65535"),
        (("--limits", "some"), "invalid choice"),
        (("--region", "Mars"), "is not a region such as us-east-1"),
        (("--account-id", "12"), "does not have 12 digits"),
        (("--time-scale", "0"), "is not a factor from 0.0001 to 1000"),
        (("--state-delay", "-1"), "is not a number of seconds from 0 to 86400"),
        (("--certificate", "/nowhere.pem"), "no such file: /nowhere.pem"),
        (("--key", "/nowhere.pem"), "pass the certificate too"),
        (("--",), "no program after --"),
        (("--", "/no/such/program"), "program not found: '/no/such/program'"),
        (("surplus",), "unrecognized arguments: surplus"),
        (("--data", "/dev/null/folder"), "as data folder"),
    ],
)
def test_what_cannot_be_is_said_in_a_line_with_exit_code_2(options, said):
    done = run("--port", "0", *options) if "--port" not in options else run(*options)
    assert done.returncode == 2
    assert said in done.stderr
    assert "Traceback" not in done.stderr


def test_a_port_in_use_is_said():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = run("--port", str(port))
    assert done.returncode == 2
    assert f"port {port} on 127.0.0.1 is in use" in done.stderr


def test_data_survives_kill_9_with_every_acknowledged_record(tmp_path):
    acknowledged = {}
    for life in range(3):
        with serving("--data", str(tmp_path), "--create", "orders:2") as process:
            assert dict(read_all(client(process.url))).items() >= acknowledged.items()
            stop = threading.Event()
            writers = [
                threading.Thread(target=write_until, args=(stop, process.url, acknowledged, f"{life}-{n}"))
                for n in range(3)
            ]
            for writer in writers:
                writer.start()
            wanted = (life + 1) * 300
            while len(acknowledged) < wanted:
                stop.wait(0.01)
            process.kill()
            stop.set()
            for writer in writers:
                writer.join(20)
    with serving("--data", str(tmp_path)) as process:
        kinesis = client(process.url)
        kept = read_all(kinesis)
        assert dict(kept).items() >= acknowledged.items()
        assert len(kept) == len({number for number, _ in kept})
        newest = max(int(number) for number, _ in kept if shard_index(number) == 0)
        put = kinesis.put_record(StreamName="orders", Data=b"x", PartitionKey="key", ExplicitHashKey="0")
        assert int(put["SequenceNumber"]) > newest


def shard_index(sequence_number):
    return int(sequence_number) >> 4 & 0xFFFF


def write_until(stop, url, acknowledged, label):
    kinesis = client(url)
    count = 0
    with suppress(botocore.exceptions.BotoCoreError):
        while not stop.is_set():
            records = [
                {"Data": f"{label}-{count}-{n}".encode(), "PartitionKey": f"{label}-{count}-{n}"} for n in range(10)
            ]
            answer = kinesis.put_records(StreamName="orders", Records=records)
            for record, result in zip(records, answer["Records"], strict=True):
                acknowledged[result["SequenceNumber"]] = record["Data"]
            count += 1


def test_streams_consumers_and_closed_shards_come_back(tmp_path):
    with serving("--data", str(tmp_path), "--create", "orders") as process:
        kinesis = client(process.url)
        kinesis.put_record(StreamName="orders", Data=b"before", PartitionKey="key", ExplicitHashKey="0")
        kinesis.split_shard(StreamName="orders", ShardToSplit=SHARD_0, NewStartingHashKey=str(1 << 127))
        arn = kinesis.describe_stream_summary(StreamName="orders")["StreamDescriptionSummary"]["StreamARN"]
        kinesis.register_stream_consumer(StreamARN=arn, ConsumerName="reader")
        consumers = kinesis.list_stream_consumers(StreamARN=arn)["Consumers"]
        kinesis.add_tags_to_stream(StreamName="orders", Tags={"team": "shop"})
        shards = kinesis.list_shards(StreamName="orders")["Shards"]
        refused = run("--port", "0", "--data", str(tmp_path))
        assert refused.returncode == 2
        assert f"in use by another local Kinesis (process {process.pid})" in refused.stderr
        process.kill()
        process.wait()
    with serving("--data", str(tmp_path), "--create", "orders") as process:
        kinesis = client(process.url)
        assert kinesis.list_shards(StreamName="orders")["Shards"] == shards
        assert [data for _, data in read_all(kinesis)] == [b"before"]
        assert kinesis.list_stream_consumers(StreamARN=arn)["Consumers"] == consumers
        assert kinesis.list_tags_for_stream(StreamName="orders")["Tags"] == [{"Key": "team", "Value": "shop"}]
        reset = urllib.request.Request(f"{process.url}/_local/reset", headers={"x-anabranch": "1"}, method="POST")
        with urllib.request.urlopen(reset, timeout=PATIENCE):
            pass
        assert read_all(kinesis) == []
        process.kill()
        process.wait()
    with serving("--data", str(tmp_path)) as process:
        kinesis = client(process.url)
        assert kinesis.list_streams()["StreamNames"] == ["orders"]
        assert len(kinesis.list_shards(StreamName="orders")["Shards"]) == 1
