"""What a local Kinesis does after a split, with a closed shard, in fan-out and above the quotas (docs/comparison.md).

    python benchmarks/server_behaviour.py                          # ours with --limits aws, and moto
    python benchmarks/server_behaviour.py http://127.0.0.1:4567    # any other server that is running

The streams that it creates stay.
"""

import sys
import time
from contextlib import ExitStack, suppress
from pathlib import Path

import boto3
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError
from botocore.parsers import ResponseParserError

from anabranch.testing.doubles import run_local_kinesis

sys.path.append(str(Path(__file__).parents[1] / "tests"))

from services import moto_dynamodb

PARENT = "shardId-000000000000"
DIRECT = Config(retries={"max_attempts": 1}, read_timeout=15)


def client(url):
    keys = {"aws_access_key_id": "local", "aws_secret_access_key": "local"}
    return boto3.client("kinesis", endpoint_url=url, region_name="us-east-1", config=DIRECT, **keys)


def when_active(kinesis, stream):
    while True:
        description = kinesis.describe_stream(StreamName=stream)["StreamDescription"]
        if description["StreamStatus"] == "ACTIVE":
            return description
        time.sleep(0.1)


def split(kinesis, stream):
    kinesis.create_stream(StreamName=stream, ShardCount=1)
    when_active(kinesis, stream)
    kinesis.split_shard(StreamName=stream, ShardToSplit=PARENT, NewStartingHashKey=str(1 << 127))
    when_active(kinesis, stream)


def writes_after_a_split(kinesis, stream):
    shards = {
        kinesis.put_record(StreamName=stream, PartitionKey=str(number), Data=b"x")["ShardId"] for number in range(20)
    }
    return "to the closed parent" if PARENT in shards else f"to {len(shards)} children"


def the_closed_shard(kinesis, stream):
    start = kinesis.get_shard_iterator(StreamName=stream, ShardId=PARENT, ShardIteratorType="TRIM_HORIZON")
    iterator = start["ShardIterator"]
    for _ in range(4):
        page = kinesis.get_records(ShardIterator=iterator)
        iterator = page.get("NextShardIterator")
        if not iterator:
            return f"ends, and names {len(page.get('ChildShards') or ())} children"
        time.sleep(0.25)
    return "did not end in four reads"


def fan_out(kinesis, stream):
    arn = when_active(kinesis, stream)["StreamARN"]
    consumer = kinesis.register_stream_consumer(StreamARN=arn, ConsumerName="behaviour")["Consumer"]["ConsumerARN"]
    time.sleep(1)
    shard = kinesis.list_shards(StreamName=stream)["Shards"][-1]["ShardId"]
    position = {"Type": "LATEST"}
    events = kinesis.subscribe_to_shard(ConsumerARN=consumer, ShardId=shard, StartingPosition=position)["EventStream"]
    with suppress(StopIteration):
        next(iter(events))
    return "an event arrived"


def writes_above_the_quota(kinesis, stream):
    entries = [{"PartitionKey": "k", "Data": b"x"}] * 500
    results = [kinesis.put_records(StreamName=stream, Records=entries)["FailedRecordCount"] for _ in range(4)]
    return f"{sum(results)} of 2,000 records to one shard throttled"


def report(name, url):
    kinesis, stream = client(url), f"behaviour-{time.time_ns()}"
    print(f"{name} ({url})")
    split(kinesis, stream)
    for check in (writes_after_a_split, the_closed_shard, fan_out, writes_above_the_quota):
        try:
            answer = check(kinesis, stream)
        except (BotoCoreError, ClientError, ResponseParserError) as error:
            answer = str(error).partition("\n")[0][:100]
        print(f"  {check.__name__.replace('_', ' ')}: {answer}")


if __name__ == "__main__":
    with ExitStack() as servers:
        if urls := sys.argv[1:]:
            for url in urls:
                report("server", url)
        else:
            report("anabranch", servers.enter_context(run_local_kinesis(limits="aws")).endpoint_url)
            report("moto", servers.enter_context(moto_dynamodb()).url)
