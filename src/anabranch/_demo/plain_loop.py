"""The loop that people write first: list the shards, read each from the tip, look for new shards now and then.

Run as `python -m anabranch._demo.plain_loop STREAM`, on botocore's client (the one boto3 returns). It keeps no
position, ignores lineage and uses the client's default retries. Nothing in it was made worse for the demo.
"""

import os
import sys
import time

from botocore.exceptions import ClientError
from botocore.session import get_session

from anabranch._engine.tasks import on_parent_exit

STDOUT = 1
LOOK_FOR_SHARDS_EVERY_SECONDS = 10


def main(stream: str) -> None:
    kinesis = get_session().create_client("kinesis")
    iterators: dict[str, str] = {}
    known: dict[str, None] = {}
    looked_at = -float(LOOK_FOR_SHARDS_EVERY_SECONDS)
    while True:
        if time.monotonic() - looked_at >= LOOK_FOR_SHARDS_EVERY_SECONDS:
            looked_at = time.monotonic()
            for shard in kinesis.list_shards(StreamName=stream)["Shards"]:
                shard_id = shard["ShardId"]
                if shard_id not in known:
                    known[shard_id] = None
                    answer = kinesis.get_shard_iterator(StreamName=stream, ShardId=shard_id, ShardIteratorType="LATEST")
                    iterators[shard_id] = answer["ShardIterator"]
        for shard_id, iterator in list(iterators.items()):
            try:
                answer = kinesis.get_records(ShardIterator=iterator, Limit=1000)
            except ClientError:
                continue
            for record in answer["Records"]:
                line = f"{time.monotonic_ns()} {record['Data'].decode()} {record['PartitionKey']} {shard_id} plain\n"
                os.write(STDOUT, line.encode())
            following = answer.get("NextShardIterator")
            if following is None:
                del iterators[shard_id]
            else:
                iterators[shard_id] = following
        time.sleep(0.2)


if __name__ == "__main__":
    on_parent_exit(sys.stdin.fileno(), lambda: os._exit(1))  # a pipe that ends with the demo
    main(sys.argv[1])
