"""A function behind a Kinesis trigger: it opens aggregates, and its results are delivered before it returns."""

import base64
from typing import Any

import boto3

import anabranch

producer = anabranch.SyncProducer("results")  # reused by later invocations


def handler(event: dict[str, Any], context: object) -> int:  # noqa: ARG001 -- how Lambda calls it
    total = 0
    for record in anabranch.deaggregate(event, decode=int):
        total += record.value
        producer.put(b"charged %d" % record.value, record.partition_key)
    if not producer.flush(deadline=10).complete:  # Lambda runs nothing between invocations
        raise TimeoutError("not all results are delivered: Lambda has to call this function again")
    return total


def local_event() -> dict[str, Any]:
    """The event that Lambda would make of the records in the local stream."""
    kinesis = boto3.client("kinesis")
    records = []
    for shard in kinesis.list_shards(StreamName="orders")["Shards"]:
        start = kinesis.get_shard_iterator(
            StreamName="orders", ShardId=shard["ShardId"], ShardIteratorType="TRIM_HORIZON"
        )
        for record in kinesis.get_records(ShardIterator=start["ShardIterator"])["Records"]:
            part = {
                "data": base64.b64encode(record["Data"]).decode(),
                "partitionKey": record["PartitionKey"],
                "sequenceNumber": record["SequenceNumber"],
                "approximateArrivalTimestamp": record["ApproximateArrivalTimestamp"].timestamp(),
            }
            records.append({"eventID": f"{shard['ShardId']}:{record['SequenceNumber']}", "kinesis": part})
    return {"Records": records}


if __name__ == "__main__":
    with anabranch.SyncProducer("orders") as orders:  # combines small records into aggregates
        orders.put_many((f"customer-{number % 5}", str(number).encode()) for number in range(100))
    event = local_event()
    print(f"total {handler(event, None)} of 100 orders, aggregated: {len(event['Records']) < 100}")
    producer.close()
