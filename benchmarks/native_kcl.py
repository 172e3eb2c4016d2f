"""native-aws-kcl-py as a peer of `consume.py`, which starts this in an environment of its own (an older aiobotocore).

Its scheduler, shard consumers and checkpoints run as they are. Leases are in memory, so that no store is measured, and
short, so that it starts soon. It has no pause between reads, and checkpoints once a page, as its documentation shows.
"""

import asyncio
import gc
import logging
import os
import sys
import time
from dataclasses import replace

import native_aws_kcl_py as kcl
from native_aws_kcl_py.leases import lease_coordinator
from native_aws_kcl_py.types.config import CoordinatorConfig, RetrievalConfig

SHARDS = 8
SHAPES = {"0": ("1000x1024", 1000, 2), "1": ("10000x100", 10_000, 1)}  # as in consume.py: page, its records, pages


class MemoryLeases:
    def __init__(self, *_, **__):
        self.leases = {}

    async def create_lease_table_if_not_exists(self):
        return True

    async def wait_for_table_active(self):
        pass

    async def lease_table_exists(self):
        return True

    async def list_leases(self):
        return [replace(lease) for lease in self.leases.values()]

    async def get_lease(self, lease_key):
        lease = self.leases.get(lease_key)
        return None if lease is None else replace(lease)

    async def create_lease(self, lease):
        if lease.lease_key in self.leases:
            return False
        self.leases[lease.lease_key] = replace(lease)
        return True

    async def renew_lease(self, lease):
        return await self.update_lease(lease)

    async def take_lease(self, lease, new_owner):
        lease.lease_owner = new_owner
        return await self.update_lease(lease)

    async def evict_lease(self, lease):
        lease.lease_owner = None
        return await self.update_lease(lease)

    async def update_lease(self, lease):
        lease.lease_counter += 1
        self.leases[lease.lease_key] = replace(lease)
        return True

    async def delete_lease(self, lease):
        self.leases.pop(lease.lease_key, None)

    async def delete_all_leases(self):
        self.leases.clear()

    def is_lease_expired(self, lease, lease_duration_millis):  # noqa: ARG002 -- one worker
        return lease.lease_owner is None


class Reader(kcl.ShardRecordProcessor):
    def __init__(self, measured):
        self.measured = measured

    async def initialize(self, _):
        pass

    async def process_records(self, given):
        measured = self.measured
        for record in given.records:
            record.data, record.partition_key  # noqa: B018 -- what a reader does at least
        measured["left"] -= len(given.records)
        if given.records:
            await given.checkpointer.checkpoint()
        if measured["left"] <= 0 and not measured["over"].done():
            measured["over"].set_result(time.process_time())

    async def lease_lost(self, _):
        pass

    async def shard_ended(self, given):
        await given.checkpointer.checkpoint()

    async def shutdown_requested(self, _):
        pass


class Readers(kcl.ShardRecordProcessorFactory):
    def __init__(self, measured):
        self.measured = measured

    def create_processor(self):
        return Reader(self.measured)


async def measure(url, page, records_a_page, pages):
    stream, count = f"plain-{SHARDS}s-{pages}p-{page}", SHARDS * pages * records_a_page
    measured = {"left": count, "over": asyncio.get_running_loop().create_future()}
    scheduler = kcl.Scheduler(
        kcl.KinesisConsumerConfig(
            aws=kcl.AwsConfig(region="us-east-1", kinesis_endpoint=url),
            application_name="bench",
            stream_name=stream,
            record_processor_factory=Readers(measured),
            coordinator=CoordinatorConfig(lease_duration_millis=500),
            retrieval=RetrievalConfig(stream_name=stream, idle_time_between_reads_millis=0),
        )
    )
    gc.collect()
    start = time.process_time()
    running = asyncio.create_task(scheduler.run())
    await asyncio.wait([measured["over"], running], return_when=asyncio.FIRST_COMPLETED, timeout=120)
    taken = (measured["over"].result() - start) / count * 1e6
    await scheduler.shutdown()
    await running
    return taken


def main():
    lease_coordinator.DynamoDBLeaseRefresher = MemoryLeases
    logging.disable(logging.CRITICAL)
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    for line in sys.stdin:
        number, _ = line.split(" ", 1)
        print(asyncio.run(measure(sys.argv[2], *SHAPES[number])), flush=True)


if __name__ == "__main__":
    main()
