"""What our producer writes, others read: aws-kinesis-agg over boto3's records, record for record."""

import base64

import boto3
import pytest

from anabranch.sync_producer import SyncProducer

deaggregator = pytest.importorskip("aws_kinesis_agg.deaggregator", reason="aws-kinesis-agg is not installed")


def read_by_others(client, shard_id):
    """(partition key, data, sequence number, sub-sequence number), as aws-kinesis-agg finds them."""
    iterator = client.get_shard_iterator(StreamName="orders", ShardId=shard_id, ShardIteratorType="TRIM_HORIZON")
    for record in client.get_records(ShardIterator=iterator["ShardIterator"])["Records"]:
        record.setdefault("EncryptionType", "NONE")
        for found in deaggregator.iter_deaggregate_records(record, data_format="Boto3"):
            if "kinesis" in found and found["kinesis"].get("aggregated"):
                inner = found["kinesis"]
                data, sub_sequence_number = base64.b64decode(inner["data"]), inner["subSequenceNumber"]
                yield inner["partitionKey"], data, inner["sequenceNumber"], sub_sequence_number
            else:  # not an aggregate: handed on as it came
                yield record["PartitionKey"], record["Data"], record["SequenceNumber"], -1


@pytest.mark.parametrize("aggregate", ["shard", "key", None])
def test_aws_kinesis_agg_reads_every_record_at_the_place_that_was_reported(local_kinesis, aggregate):
    client = boto3.client("kinesis")
    client.create_stream(StreamName="orders", ShardCount=3)
    items = [(f"ключ-{number % 40}", b"%d" % number * (number % 50)) for number in range(2_000)]
    with SyncProducer("orders", aggregate=aggregate) as producer:
        producer.put_and_wait(b"warm", "up")
        results = [delivery.result() for delivery in producer.put_many(items)]
    assert all(result.delivered for result in results)
    reported = {(r.partition_key, r.data, r.sequence_number, r.sub_sequence_number, r.shard_id): None for r in results}
    found = {
        (*record, shard["ShardId"]): None
        for shard in client.list_shards(StreamName="orders")["Shards"]
        for record in read_by_others(client, shard["ShardId"])
        if record[0] != "up"
    }
    assert found.keys() == reported.keys()
    assert len(found) == 2_000
