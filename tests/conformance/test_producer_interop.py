"""What our producer writes, others read: boto3 reads the records, protobuf opens the aggregates."""

import boto3
import pytest

from aggregate_oracle import read_aggregate
from anabranch.sync_producer import SyncProducer


def read_by_others(client, shard_id):
    """(partition key, data, sequence number, sub-sequence number or -1)."""
    iterator = client.get_shard_iterator(StreamName="orders", ShardId=shard_id, ShardIteratorType="TRIM_HORIZON")
    for record in client.get_records(ShardIterator=iterator["ShardIterator"])["Records"]:
        opened = read_aggregate(record["Data"])
        if opened is None:
            yield record["PartitionKey"], record["Data"], record["SequenceNumber"], -1
        else:
            for number, (partition_key, _, data) in enumerate(opened):
                yield partition_key, data, record["SequenceNumber"], number


@pytest.mark.parametrize("aggregate", ["shard", "key", None])
def test_others_read_every_record_where_it_was_reported(local_kinesis, aggregate):
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
