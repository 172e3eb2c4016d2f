"""LocalKinesis inside a process: its life, its settings, and what happens when its parts fail."""

import asyncio
import json
import os
import sys
import urllib.error
import urllib.request

import pytest

from anabranch.errors import ConfigurationError, UsageError
from anabranch.local import LocalKinesis
from anabranch.local.server import write_self_signed_certificate
from patience import PATIENCE

AUTHORIZATION = (
    "AWS4-HMAC-SHA256 Credential=a/20261116/us-east-1/kinesis/aws4_request, SignedHeaders=host, Signature=00"
)


def call(kinesis, operation, **members):
    """Status and body of a call, made in a thread: the server lives in this loop."""

    def blocking():
        request = urllib.request.Request(
            kinesis.endpoint_url,
            json.dumps(members).encode(),
            {
                "content-type": "application/x-amz-json-1.1",
                "x-amz-target": f"Kinesis_20131202.{operation}",
                "x-amz-date": "20261116T000000Z",
                "authorization": AUTHORIZATION,
            },
        )
        try:
            with urllib.request.urlopen(request, timeout=PATIENCE) as response:
                return response.status, json.loads(response.read() or b"{}")
        except urllib.error.HTTPError as error:
            with error:
                return error.code, json.loads(error.read())

    return asyncio.to_thread(blocking)


def running(test):
    def run(*fixtures, **named):
        asyncio.run(asyncio.wait_for(test(*fixtures, **named), PATIENCE))

    run.__name__ = test.__name__
    return run


@running
async def test_a_stopped_server_can_be_started_again_and_a_running_one_cannot():
    kinesis = LocalKinesis(create={"orders": 2}, tls=True)
    with pytest.raises(UsageError, match="not running"):
        _ = kinesis.endpoint_url
    for _ in range(2):
        async with kinesis:
            assert kinesis.certificate_path.exists()
            assert kinesis.environment()["AWS_CA_BUNDLE"] == str(kinesis.certificate_path)
            with pytest.raises(UsageError, match="is already running"):
                await kinesis.start()
        assert kinesis.certificate_path is None


@running
async def test_a_host_with_two_addresses_gets_one_port():
    async with LocalKinesis(host="localhost", create={"orders": 1}) as kinesis:
        assert (await call(kinesis, "ListStreams"))[1]["StreamNames"] == ["orders"]


@running
async def test_account_and_region_are_in_every_arn():
    async with LocalKinesis(create={"orders": 1}, region="eu-central-1", account_id="123456789012") as kinesis:
        _, answer = await call(kinesis, "DescribeStreamSummary", StreamName="orders")
    arn = answer["StreamDescriptionSummary"]["StreamARN"]
    assert arn == "arn:aws:kinesis:eu-central-1:123456789012:stream/orders"


@running
async def test_state_changes_take_the_state_delay_and_need_no_call():
    async with LocalKinesis(create={"orders": 1}, state_delay=0.2) as kinesis:
        _, answer = await call(kinesis, "DescribeStreamSummary", StreamName="orders")
        assert answer["StreamDescriptionSummary"]["StreamStatus"] == "CREATING"
        while kinesis.state.next_deadline_ms() is not None:  # noqa: ASYNC110 -- the state is pure: nothing to await
            await asyncio.sleep(0.01)
        _, answer = await call(kinesis, "DescribeStreamSummary", StreamName="orders")
        assert answer["StreamDescriptionSummary"]["StreamStatus"] == "ACTIVE"


@running
async def test_faults_for_a_stream_are_found_behind_arns_and_iterators():
    async with LocalKinesis(create={"orders": 1, "returns": 1}) as kinesis:
        kinesis.faults.on(stream="orders").throttle()
        arn = "arn:aws:kinesis:us-east-1:000000000000:stream/"
        for name, status in (("orders", 400), ("returns", 200)):
            assert (await call(kinesis, "ListShards", StreamName=name))[0] == status
            assert (await call(kinesis, "ListShards", StreamARN=arn + name))[0] == status
            assert (await call(kinesis, "PutRecords", StreamARN=arn + name, Records=[RECORD]))[0] == status
            iterator = kinesis.state.call("GetShardIterator", position(name), now_ms=2_000_000_000_000)
            assert (await call(kinesis, "GetRecords", **iterator))[0] == status
        assert (await call(kinesis, "GetRecords", ShardIterator="x"))[0] == 400
        assert (await call(kinesis, "ListStreams"))[0] == 200


RECORD = {"Data": "eA==", "PartitionKey": "key"}


def position(name):
    return {"StreamName": name, "ShardId": "shardId-000000000000", "ShardIteratorType": "LATEST"}


def test_after_a_disk_failure_every_call_is_an_internal_failure(tmp_path, monkeypatch, caplog):
    def refuse(_):
        raise OSError(28, "No space left on device")

    @running
    async def main():
        async with LocalKinesis(create={"orders": 1}, data=tmp_path) as kinesis:
            put = {"StreamName": "orders", "Records": [RECORD]}
            assert (await call(kinesis, "PutRecords", **put))[0] == 200
            monkeypatch.setattr(os, "fsync", refuse)
            for _ in range(2):
                status, answer = await call(kinesis, "PutRecords", **put)
                assert (status, answer["__type"]) == (500, "InternalFailure")
                assert "No space left on device" in answer["message"]
            monkeypatch.undo()

    main()
    assert caplog.text.count("cannot write") == 1


def test_damaged_data_stops_the_server_and_can_be_saved(tmp_path):
    journal = tmp_path / "journal"

    async def texts(kinesis):
        start = {"StreamName": "orders", "ShardId": "0", "ShardIteratorType": "TRIM_HORIZON"}
        _, answer = await call(kinesis, "GetShardIterator", **start)
        _, answer = await call(kinesis, "GetRecords", ShardIterator=answer["ShardIterator"])
        return [record["Data"] for record in answer["Records"]]

    @running
    async def main():
        async with LocalKinesis(create={"orders": 1}, data=tmp_path) as kinesis:
            for text in ("Zmlyc3Q=", "c2Vjb25k", "dGhpcmQ="):  # first, second, third
                await call(kinesis, "PutRecords", StreamName="orders", Records=[{"Data": text, "PartitionKey": "k"}])
        with journal.open("ab") as file:
            file.write(bytes(8))
        async with LocalKinesis(data=tmp_path) as kinesis:
            assert len(await texts(kinesis)) == 3
            await call(kinesis, "PutRecords", StreamName="orders", Records=[{"Data": "bGFzdA==", "PartitionKey": "k"}])
        damaged = bytearray(journal.read_bytes())
        damaged[damaged.index(b"second")] ^= 0x20
        journal.write_bytes(damaged)
        for _ in range(2):
            with pytest.raises(ConfigurationError, match="is damaged"):
                await LocalKinesis(data=tmp_path).start()
            assert journal.read_bytes() == damaged
        async with LocalKinesis(data=tmp_path, salvage=True) as kinesis:
            assert await texts(kinesis) == ["bGFzdA=="]
        assert (tmp_path / "journal.damaged-1").read_bytes() == damaged
        async with LocalKinesis(data=tmp_path) as kinesis:
            assert await texts(kinesis) == ["bGFzdA=="]

    main()


def test_expired_records_are_freed_in_memory_and_in_the_journal(tmp_path):
    @running
    async def main():
        async with LocalKinesis(create={"orders": 1}, data=tmp_path, time_scale=0.00001) as kinesis:  # under a second
            data = "A" * 1_000_000
            for _ in range(3):
                await call(kinesis, "PutRecords", StreamName="orders", Records=[{"Data": data, "PartitionKey": "k"}])
            async with asyncio.timeout(PATIENCE):
                while kinesis.state.account.size_bytes or (tmp_path / "journal").stat().st_size > 10_000:  # noqa: ASYNC110 -- by time
                    await asyncio.sleep(0.05)
            await call(kinesis, "PutRecords", StreamName="orders", Records=[RECORD])
        async with LocalKinesis(data=tmp_path) as kinesis:
            assert len(kinesis.state.account.streams["orders"].shards["shardId-000000000000"].log) == 1

    main()


def test_a_reset_also_empties_the_data_and_creates_the_streams_again(tmp_path):
    @running
    async def main():
        async with LocalKinesis(create={"orders": 1}, data=tmp_path) as kinesis:
            await call(kinesis, "CreateStream", StreamName="other", ShardCount=1)
            await call(kinesis, "PutRecords", StreamName="orders", Records=[RECORD])
            await kinesis.reset()
        async with LocalKinesis(data=tmp_path) as kinesis:
            assert list(kinesis.state.account.streams) == ["orders"]
            assert kinesis.state.account.size_bytes == 0

    main()


def test_an_unreadable_journal_leaves_no_lock_behind(tmp_path):
    @running
    async def main():
        async with LocalKinesis(create={"orders": 1}, data=tmp_path):
            pass
        journal = (tmp_path / "journal").read_bytes()
        head = journal[: journal.index(b"\n") + 1]
        (tmp_path / "journal").write_bytes(head + bytes.fromhex("00000001a505df1b01"))
        for _ in range(2):
            with pytest.raises(ConfigurationError, match=rf"{tmp_path}/journal: journal entry 0.*--salvage"):
                await LocalKinesis(data=tmp_path).start()
        damaged = (tmp_path / "journal").read_bytes()
        async with LocalKinesis(data=tmp_path, salvage=True):
            assert (tmp_path / "journal.damaged-1").read_bytes() == damaged
        (tmp_path / "journal").write_bytes(journal)
        async with LocalKinesis(data=tmp_path) as kinesis:
            assert (await call(kinesis, "ListStreams"))[1]["StreamNames"] == ["orders"]

    main()


def test_a_data_folder_that_cannot_be_used_is_an_error(tmp_path):
    (tmp_path / "file").touch()
    (tmp_path / "taken" / "journal").mkdir(parents=True)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "journal.new").symlink_to("/dev/full")

    @running
    async def main():
        for place, reason in (
            ("file/folder", "Not a directory"), ("taken", "Is a directory"), ("full", "No space left on device"),
        ):  # fmt: skip
            for _ in range(2):
                with pytest.raises(ConfigurationError, match=f"cannot use {tmp_path / place} as data folder: {reason}"):
                    await LocalKinesis(data=tmp_path / place).start()

    main()


def test_a_missing_extra_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "cryptography", None)
    with pytest.raises(ConfigurationError, match=r"pip install 'anabranch\[tls\]'"):
        write_self_signed_certificate(tmp_path, "127.0.0.1", None)


def test_invalid_settings_are_rejected_at_once(tmp_path):
    with pytest.raises(ConfigurationError, match="a key needs its certificate"):
        LocalKinesis(key="key.pem")
    with pytest.raises(ConfigurationError, match=r"region: 'moon'.*account_id: '1'"):
        LocalKinesis(region="moon", account_id="1")
    (tmp_path / "empty.pem").write_text("")
    with pytest.raises(ConfigurationError, match="cannot load certificate"):
        asyncio.run(LocalKinesis(certificate=tmp_path / "empty.pem").start())
