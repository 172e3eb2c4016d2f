import base64
from functools import partial

import msgspec
import pytest

from anabranch.local.actions.records import PutRecordsRequest
from anabranch.local.bodies import JSON
from anabranch.local.errors import LocalError
from anabranch.local.state.identifiers import parse_sequence_number

MIB = 1 << 20
LOW, HIGH = "shardId-000000000000", "shardId-000000000001"
TOP_HASH_KEY = (1 << 128) - 1


def test_the_md5_of_the_key_or_the_explicit_hash_key_chooses_the_shard(kinesis):
    assert kinesis.put("a", key="k")[0]["ShardId"] == HIGH  # md5("k") begins with 0x8c
    assert kinesis.put("b", key="k", hash_key=0)[0]["ShardId"] == LOW
    assert kinesis.put("c", key="k", hash_key=TOP_HASH_KEY)[0]["ShardId"] == HIGH
    assert kinesis.fails(
        "PutRecord", StreamName="orders", Data=b"", PartitionKey="k", ExplicitHashKey=str(TOP_HASH_KEY + 1)
    ) == (
        "InvalidArgumentException: Invalid ExplicitHashKey. ExplicitHashKey must be in the range: [0, 2^128-1]. "
        "Specified value was 340282366920938463463374607431768211456"
    )


def test_sequence_numbers_have_awss_layout_and_grow(kinesis):
    first, second = (int(answer["SequenceNumber"]) for answer in kinesis.put("a", "b"))
    assert len(str(first)) == 56
    assert str(first).startswith("49")
    assert parse_sequence_number(first)._replace(counter=0) == (1_800_000_000, 1, 0)
    assert second > first > int(kinesis.shards()[HIGH]["SequenceNumberRange"]["StartingSequenceNumber"])
    digits = f"{first:x}"
    assert (len(digits), digits[0], digits[10], digits[27:29], digits[-1]) == (47, "2", "1", "00", "2")


def test_a_record_has_exactly_the_members_of_aws(kinesis):
    sequence_number = kinesis.put("hello", key="k")[0]["SequenceNumber"]
    answer = kinesis.GetRecords(ShardIterator=kinesis.iterator(shard_id=HIGH))
    assert set(answer) == {"Records", "NextShardIterator", "MillisBehindLatest"}
    assert msgspec.json.decode(msgspec.json.encode(answer["Records"])) == [
        {
            "SequenceNumber": sequence_number,
            "ApproximateArrivalTimestamp": 1_800_000_000.0,
            "Data": "aGVsbG8=",
            "PartitionKey": "k",
        }
    ]
    assert answer["Records"][0].members() == {
        "SequenceNumber": sequence_number,
        "ApproximateArrivalTimestamp": 1_800_000_000.0,
        "Data": b"hello",
        "PartitionKey": "k",
    }


def test_every_iterator_type_starts_at_its_position(kinesis):
    put = []
    for text in ("a", "b", "c"):
        put += kinesis.put(text, hash_key=0)
        kinesis.wait(ms=10)
    middle = put[1]["SequenceNumber"]
    assert kinesis.read("TRIM_HORIZON") == ["a", "b", "c"]
    assert kinesis.read("AT_SEQUENCE_NUMBER", StartingSequenceNumber=middle) == ["b", "c"]
    assert kinesis.read("AFTER_SEQUENCE_NUMBER", StartingSequenceNumber=middle) == ["c"]
    assert kinesis.read("AT_TIMESTAMP", Timestamp=1_800_000_000.010) == ["b", "c"]
    assert kinesis.read("AT_TIMESTAMP", Timestamp=1_800_000_000.011) == ["c"]
    assert kinesis.read("AT_TIMESTAMP", Timestamp=0) == ["a", "b", "c"]
    latest = kinesis.iterator("LATEST")
    tip = kinesis.iterator("AT_TIMESTAMP", Timestamp=kinesis.now_ms / 1000)
    kinesis.put("d", hash_key=0)
    for iterator in (latest, tip):
        assert [record.data for record in kinesis.GetRecords(ShardIterator=iterator)["Records"]] == [b"d"]


def test_the_start_of_a_shard_is_a_position_too(kinesis):
    kinesis.put("a", hash_key=0)
    start = kinesis.shards()[LOW]["SequenceNumberRange"]["StartingSequenceNumber"]
    assert kinesis.read("AT_SEQUENCE_NUMBER", StartingSequenceNumber=start) == ["a"]
    assert kinesis.read("AFTER_SEQUENCE_NUMBER", StartingSequenceNumber=start) == ["a"]


def test_invalid_positions_are_rejected_with_awss_messages(kinesis):
    def fails(kind, shard_id=LOW, **more):
        return kinesis.fails(
            "GetShardIterator", StreamName="orders", ShardId=shard_id, ShardIteratorType=kind, **more
        ).removeprefix("InvalidArgumentException: ")

    number = kinesis.put("a", hash_key=0)[0]["SequenceNumber"]
    either = (
        "Must either specify (1) AT_SEQUENCE_NUMBER or AFTER_SEQUENCE_NUMBER and StartingSequenceNumber or "
        "(2) TRIM_HORIZON or LATEST and no StartingSequenceNumber. Request specified "
    )
    assert fails("AT_SEQUENCE_NUMBER") == either + "AT_SEQUENCE_NUMBER and no StartingSequenceNumber."
    assert fails("LATEST", StartingSequenceNumber=number) == either + "LATEST and also a StartingSequenceNumber."
    assert fails("AT_TIMESTAMP").startswith("Must specify timestampInMillis parameter")
    assert fails("LATEST", Timestamp=1.0).startswith("Request specified LATEST and also a timestamp")
    assert fails("AT_TIMESTAMP", Timestamp=1_800_000_000.5) == (
        "The timestampInMillis parameter cannot be greater than the currentTimestampInMillis. "
        "timestampInMillis: 1800000000500, currentTimestampInMillis: 1800000000000"
    )
    assert fails("AT_SEQUENCE_NUMBER", HIGH, StartingSequenceNumber=number) == (
        f"Invalid StartingSequenceNumber. It encodes {LOW}, while it was used in a call to a shard with {HIGH}"
    )
    assert fails("AT_SEQUENCE_NUMBER", StartingSequenceNumber="5") == (
        f"StartingSequenceNumber 5 used in GetShardIterator on shard {LOW} in stream orders under account 000000000000 "
        "is invalid."
    )
    assert fails("AT_SEQUENCE_NUMBER", StartingSequenceNumber=str(int(number) + (4 << 80))).endswith(
        "no such record yet."
    )
    kinesis.DeleteStream(StreamName="orders")
    kinesis.wait(ms=1000)
    kinesis.CreateStream(StreamName="orders", ShardCount=2)
    assert fails("AT_SEQUENCE_NUMBER", StartingSequenceNumber=number).endswith(
        "because it did not come from this stream."
    )


def test_only_the_number_of_a_shard_id_matters(kinesis):
    kinesis.put("a", hash_key=0)
    for shard_id in ("0", "shardId-0", "x-0", LOW):
        assert kinesis.read(shard_id=shard_id) == ["a"]
    for shard_id in ("shardId-7", "shards", "shardId-²"):
        failure = kinesis.fails("GetShardIterator", StreamName="orders", ShardId=shard_id, ShardIteratorType="LATEST")
        assert failure.startswith(("ResourceNotFoundException: ", "ValidationException"))


def test_an_iterator_is_new_on_every_call_and_works_in_quotes_too(kinesis):
    kinesis.put("a", hash_key=0)
    first, second = kinesis.iterator(), kinesis.iterator()
    assert first != second
    assert len(kinesis.GetRecords(ShardIterator=f'"{first}"')["Records"]) == 1


def test_the_longest_name_still_gives_an_iterator_within_the_bound(kinesis):
    name = "n" * 128
    kinesis.CreateStream(StreamName=name, ShardCount=1)
    assert len(kinesis.iterator(stream=name)) <= 512


FORGED = base64.b64encode(
    b'{"stream_name":"orders","stream_created_ms":0,"shard_index":0,"position":"x","issued_ms":0}'
).decode()


@pytest.mark.parametrize("garbage", ["x", "é", "AAAA", "AAAAAAAAAAE=", "A" * 224, "e30=", FORGED])
def test_garbage_is_rejected_as_an_iterator(kinesis, garbage):
    assert kinesis.fails("GetRecords", ShardIterator=garbage) == "InvalidArgumentException: Invalid ShardIterator."


def test_an_iterator_expires_after_five_minutes_with_awss_message(kinesis):
    iterator = kinesis.iterator()
    kinesis.wait(ms=300_000)
    kinesis.GetRecords(ShardIterator=iterator)
    kinesis.wait(ms=1)
    assert kinesis.fails("GetRecords", ShardIterator=iterator) == (
        "ExpiredIteratorException: Iterator expired. The iterator was created at time Fri Jan 15 08:00:00 UTC 2027 "
        "while right now it is Fri Jan 15 08:05:00 UTC 2027 which is further in the future than the tolerated delay of "
        "300000 milliseconds."
    )


def test_the_time_scale_shortens_the_lifetime_of_iterators(make_kinesis):
    kinesis = make_kinesis(time_scale=0.01)
    kinesis.CreateStream(StreamName="orders", ShardCount=1)
    iterator = kinesis.iterator()
    kinesis.wait(ms=3001)
    assert kinesis.fails("GetRecords", ShardIterator=iterator).endswith("tolerated delay of 3000 milliseconds.")


def test_iterators_of_a_deleted_or_recreated_stream_are_rejected(kinesis):
    iterator = kinesis.iterator()
    other = "arn:aws:kinesis:us-east-1:000000000000:stream/other"
    assert kinesis.fails("GetRecords", ShardIterator=iterator, StreamARN=other).startswith("InvalidArgumentException")
    kinesis.DeleteStream(StreamName="orders")
    gone = f"ResourceNotFoundException: Shard {LOW} in stream orders under account 000000000000 does not exist"
    assert kinesis.fails("GetRecords", ShardIterator=iterator) == gone
    kinesis.wait(ms=1)
    kinesis.CreateStream(StreamName="orders", ShardCount=2)
    assert kinesis.fails("GetRecords", ShardIterator=iterator) == gone


def test_a_read_is_bounded_by_its_limit_and_by_ten_mebibytes(kinesis):
    kinesis.put(*"abcde", hash_key=0)
    answer = kinesis.GetRecords(ShardIterator=kinesis.iterator(), Limit=2)
    assert [record.data for record in answer["Records"]] == [b"a", b"b"]
    assert answer["MillisBehindLatest"] == 1
    rest = kinesis.GetRecords(ShardIterator=answer["NextShardIterator"])
    assert [record.data for record in rest["Records"]] == [b"c", b"d", b"e"]
    assert rest["MillisBehindLatest"] == 0
    for _ in range(12):
        kinesis.PutRecord(StreamName="orders", Data=bytes(MIB - 1), PartitionKey="k", ExplicitHashKey="0")
    answer = kinesis.GetRecords(ShardIterator=rest["NextShardIterator"])
    assert len(answer["Records"]) == 10
    kinesis.wait(ms=700)
    answer = kinesis.GetRecords(ShardIterator=answer["NextShardIterator"], Limit=1)
    assert answer["MillisBehindLatest"] == 700


def test_a_record_larger_than_the_rest_of_a_read_waits_for_the_next(kinesis):
    arn = "arn:aws:kinesis:us-east-1:000000000000:stream/orders"
    kinesis.UpdateMaxRecordSize(StreamARN=arn, MaxRecordSizeInKiB=10_240)
    for size in (1, 10 * MIB - 1, 1):
        kinesis.PutRecord(StreamName="orders", Data=bytes(size), PartitionKey="k", ExplicitHashKey="0")
    iterator, sizes = kinesis.iterator(), []
    for _ in range(3):
        answer = kinesis.GetRecords(ShardIterator=iterator)
        sizes.append([len(record.data) for record in answer["Records"]])
        iterator = answer["NextShardIterator"]
    assert sizes == [[1], [10 * MIB - 1], [1]]


def test_records_expire_after_the_retention_period_and_never_come_back(kinesis):
    kinesis.put("old", hash_key=0)
    kinesis.wait(hours=1)
    kinesis.put("new", hash_key=0)
    kinesis.wait(hours=23)
    assert kinesis.read() == ["old", "new"]
    kinesis.wait(ms=1)
    assert kinesis.read() == ["new"]
    assert kinesis.read("AT_TIMESTAMP", Timestamp=0) == ["new"]
    kinesis.IncreaseStreamRetentionPeriod(StreamName="orders", RetentionPeriodHours=48)
    assert kinesis.read() == ["new"]


def test_a_shorter_retention_removes_records_at_once(kinesis):
    kinesis.IncreaseStreamRetentionPeriod(StreamName="orders", RetentionPeriodHours=48)
    kinesis.put("a", hash_key=0)
    kinesis.wait(hours=30)
    assert kinesis.read() == ["a"]
    kinesis.DecreaseStreamRetentionPeriod(StreamName="orders", RetentionPeriodHours=24)
    kinesis.IncreaseStreamRetentionPeriod(StreamName="orders", RetentionPeriodHours=48)
    assert kinesis.read() == []


def test_expired_records_are_freed_by_time_and_the_rest_stays_readable(kinesis):
    for hour in range(30):
        entries = [{"Data": b"%d" % hour, "PartitionKey": "k", "ExplicitHashKey": "0"}] * 100
        kinesis.PutRecords(StreamName="orders", Records=entries)
        kinesis.wait(hours=1)
        iterator = kinesis.iterator()
    assert kinesis.GetRecords(ShardIterator=iterator)["Records"][0].data == b"6"
    log = kinesis.state.account.streams["orders"].shards[LOW].log
    assert len(log) == 2400
    kinesis.wait(hours=10)
    kinesis.state.account.free_expired(kinesis.now_ms)
    assert len(log.records) == len(log.numbers) == len(log.totals) - 1 == 1400
    assert kinesis.state.account.size_bytes < 1400 * 110
    assert kinesis.read()[0] == "16"
    kinesis.wait(hours=24)
    kinesis.state.account.free_expired(kinesis.now_ms)
    assert (log.records, kinesis.state.account.size_bytes) == ([], 0)
    kinesis.put("new", hash_key=0)
    assert kinesis.read() == ["new"]


def test_shards_that_have_expired_are_forgotten_by_time(kinesis):
    kinesis.SplitShard(StreamName="orders", ShardToSplit=LOW, NewStartingHashKey="77")
    kinesis.wait(hours=25)
    kinesis.state.account.free_expired(kinesis.now_ms)
    assert LOW not in kinesis.state.account.streams["orders"].shards


def test_put_records_returns_a_result_for_each_entry(kinesis):
    answer = kinesis.PutRecords(
        StreamName="orders",
        Records=[{"Data": b"a", "PartitionKey": "k"}, {"Data": b"b", "PartitionKey": "k", "ExplicitHashKey": "0"}],
    )
    assert answer["FailedRecordCount"] == 0
    assert [entry["ShardId"] for entry in answer["Records"]] == [HIGH, LOW]
    assert "EncryptionType" not in answer
    assert kinesis.changes[-2:] == [("orders", HIGH), ("orders", LOW)]


def test_only_the_entries_that_a_fault_names_fail(kinesis):
    answer = kinesis.state.call(
        "PutRecords",
        {"StreamName": "orders", "Records": [{"Data": text, "PartitionKey": "k"} for text in (b"a", b"b", b"c")]},
        now_ms=kinesis.now_ms,
        refused_slots={0: "ProvisionedThroughputExceededException", 2: "InternalFailure"},
    )
    assert answer["FailedRecordCount"] == 2
    assert answer["Records"][::2] == [
        {
            "ErrorCode": "ProvisionedThroughputExceededException",
            "ErrorMessage": f"Rate exceeded for shard {HIGH} in stream orders under account 000000000000.",
        },
        {"ErrorCode": "InternalFailure", "ErrorMessage": "Internal Service Failure"},
    ]
    assert kinesis.read(shard_id=HIGH) == ["b"]


def test_the_typed_request_is_decoded_from_json_and_answered_like_aws(kinesis):
    body = b'{"StreamName":"orders","Records":[{"Data":"YQ==","PartitionKey":"k"},{"Data":"YQ==","PartitionKey":"l"}]}'
    request = msgspec.json.decode(body, type=PutRecordsRequest)
    answer = msgspec.json.decode(msgspec.json.encode(kinesis.state.put_records(request, now_ms=kinesis.now_ms)))
    assert set(answer) == {"FailedRecordCount", "Records"}
    assert set(answer["Records"][0]) == {"SequenceNumber", "ShardId"}


@pytest.mark.parametrize(
    "entry, message",
    [
        ('{"Data":"","PartitionKey":""}', "Member must have length greater than or equal to 1"),
        ('{"Data":"","PartitionKey":"k","ExplicitHashKey":"01"}', "at 'records.1.member.explicitHashKey' failed"),
        (r'{"Data":"","PartitionKey":"k","ExplicitHashKey":"1\n"}', "at 'records.1.member.explicitHashKey' failed"),
        ('{"Data":"","PartitionKey":"' + "k" * 257 + '"}', "Member must have length less than or equal to 256"),
        ('{"Data":""}', "Value null at 'records.1.member.partitionKey' failed"),
    ],
)
def test_a_json_body_that_is_invalid_is_rejected_with_the_same_messages(kinesis, entry, message):
    code, said = put_json(kinesis, '{"StreamName":"orders","Records":[' + entry + "]}")
    assert (code, said.count("Value ")) == ("ValidationException", 1)
    assert message in said


def test_all_violations_of_a_json_body_are_reported_at_once(kinesis):
    assert "2 validation errors detected" in put_json(kinesis, '{"StreamName":"!","Records":[]}')[1]
    entry = '{"Data":"","PartitionKey":"k"}'
    assert (
        "1 validation error detected: Value '!' at 'streamName'"
        in (put_json(kinesis, '{"StreamName":"!","Records":[' + entry + "]}")[1])
    )
    assert (
        "at 'records' failed" in put_json(kinesis, '{"StreamName":"o","Records":[' + ",".join([entry] * 501) + "]}")[1]
    )


def put_json(kinesis, body):
    """The code and the message of the error."""
    request = JSON.decode("PutRecords", body.encode())
    is_typed = isinstance(request, PutRecordsRequest)
    put = kinesis.state.put_records if is_typed else partial(kinesis.state.call, "PutRecords")
    with pytest.raises(LocalError) as caught:
        put(request, now_ms=kinesis.now_ms)
    return caught.value.code, caught.value.message


def test_a_put_records_call_that_is_too_large_is_rejected_as_a_whole(kinesis):
    entries = [{"Data": bytes(MIB - 1), "PartitionKey": "k"}] * 10 + [{"Data": b"", "PartitionKey": "k"}]
    assert kinesis.fails("PutRecords", StreamName="orders", Records=entries) == (
        "InvalidArgumentException: Records size exceeds 10 MB limit"
    )
    assert kinesis.fails(
        "PutRecords", StreamName="orders", Records=[{"Data": bytes(MIB), "PartitionKey": "k"}]
    ).startswith("InvalidArgumentException: A record of 1048577 bytes")
    five_hundred_and_one = [{"Data": b"", "PartitionKey": "k"}] * 501
    assert "less than or equal to 500" in kinesis.fails("PutRecords", StreamName="orders", Records=five_hundred_and_one)
    assert kinesis.read(shard_id=HIGH) == []


def test_sequence_number_for_ordering_must_have_been_issued(kinesis):
    number = kinesis.put("a")[0]["SequenceNumber"]
    request = {"StreamName": "orders", "Data": b"b", "PartitionKey": "k"}
    later = kinesis.PutRecord(**request, SequenceNumberForOrdering=number)
    assert int(later["SequenceNumber"]) > int(number)
    future = str(int(number) + (3600 << 36))
    for wrong in ("0", future):
        assert kinesis.fails("PutRecord", **request, SequenceNumberForOrdering=wrong) == (
            f"InvalidArgumentException: ExclusiveMinimumSequenceNumber {wrong} used in PutRecord on stream orders "
            "under account 000000000000 is invalid."
        )


def test_a_dry_run_reports_success_and_changes_nothing(kinesis):
    iterator = kinesis.iterator(shard_id=HIGH)
    record = {"Data": b"a", "PartitionKey": "k"}
    for operation, request in (
        ("PutRecord", {"StreamName": "orders", **record}),
        ("PutRecords", {"StreamName": "orders", "Records": [record]}),
        ("GetRecords", {"ShardIterator": iterator}),
        ("GetShardIterator", {"StreamName": "orders", "ShardId": HIGH, "ShardIteratorType": "LATEST"}),
    ):
        assert kinesis.fails(operation, **request, DryRun=True).startswith("DryRunOperationException")
    assert kinesis.fails("PutRecord", StreamName="none", **record, DryRun=True).startswith("ResourceNotFound")
    assert kinesis.read(shard_id=HIGH) == []


def test_a_stream_with_auto_distribution_uses_shards_in_turn_and_needs_no_key(kinesis):
    kinesis.CreateStream(StreamName="auto", RecordDistributionStrategy="AUTO")
    answers = kinesis.PutRecords(
        StreamName="auto", Records=[{"Data": b"x"}] * 6 + [{"Data": b"y", "PartitionKey": "k"}] * 2
    )
    shard_ids = [entry["ShardId"] for entry in answers["Records"]]
    assert sorted(shard_ids) == sorted(f"shardId-00000000000{i}" for i in range(4) for _ in range(2))
    assert kinesis.PutRecord(StreamName="auto", Data=b"z")["ShardId"] == shard_ids[0]
    record = kinesis.GetRecords(ShardIterator=kinesis.iterator(stream="auto"))["Records"][0]
    assert "PartitionKey" not in record.members()
    assert record.size_bytes == 1
    arn = "arn:aws:kinesis:us-east-1:000000000000:stream/"
    kinesis.UpdateStreamRecordDistributionStrategy(
        StreamARN=arn + "auto", RecordDistributionStrategy="USER_PARTITION_KEY"
    )
    assert "'partitionKey' failed to satisfy constraint: Member must not be null" in kinesis.fails(
        "PutRecord", StreamName="auto", Data=b"z"
    )
    assert kinesis.fails(
        "UpdateStreamRecordDistributionStrategy", StreamARN=arn + "orders", RecordDistributionStrategy="AUTO"
    ).startswith("InvalidArgumentException")


def test_each_encrypted_record_is_marked(kinesis):
    kinesis.put("plain", hash_key=0)
    kinesis.StartStreamEncryption(StreamName="orders", EncryptionType="KMS", KeyId="k")
    entry = {"Data": b"secret", "PartitionKey": "k", "ExplicitHashKey": "0"}
    assert kinesis.PutRecords(StreamName="orders", Records=[entry])["EncryptionType"] == "KMS"
    kinesis.StopStreamEncryption(StreamName="orders", EncryptionType="KMS", KeyId="k")
    kinesis.put("plain", hash_key=0)
    records = kinesis.GetRecords(ShardIterator=kinesis.iterator())["Records"]
    assert [record.members().get("EncryptionType") for record in records] == [None, "KMS", None]


def test_a_clock_that_steps_back_does_not_break_the_order(kinesis):
    kinesis.put("a", hash_key=0)
    kinesis.wait(ms=-60_000)
    kinesis.put("b", hash_key=0)
    kinesis.wait(ms=60_000)
    records = kinesis.GetRecords(ShardIterator=kinesis.iterator())["Records"]
    assert [record.data for record in records] == [b"a", b"b"]
    assert records[0].approximate_arrival_timestamp <= records[1].approximate_arrival_timestamp
