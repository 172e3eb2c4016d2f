"""The two workers of `kclpy.py`, which starts this: `theirs` inside kclpy's environment, `ours` in that of the tests.

Handlers read data and key, and checkpoint every second. Both append what they handled to a file, one JSON object a
line: kclpy for each call of its handler, ours every 50 ms.
"""

import argparse
import asyncio
import json
import os
import time
from collections import defaultdict

CHECKPOINT_SECONDS = 1.0
FLUSH_SECONDS = 0.05


class Report:
    def __init__(self, path):
        self.file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        self.shards = defaultdict(lambda: {"first": time.time_ns(), "count": 0, "latencies": []})

    def note(self, shard_id, data):
        shard = self.shards[shard_id]
        shard["count"] += 1
        if data[:1] != b".":  # the others have no time
            shard["latencies"].append(time.time_ns() - int(data[:20]))

    def flush(self):
        for shard_id, found in self.shards.items():
            os.write(self.file, json.dumps({"shard": shard_id, **found}).encode() + b"\n")
        self.shards.clear()


def theirs(path):
    from amazon_kclpy import kcl
    from amazon_kclpy.v3 import processor

    class Reader(processor.RecordProcessorBase):
        def initialize(self, given):
            self.shard_id, self.checkpoint_at, self.report = given.shard_id, 0.0, Report(path)

        def process_records(self, given):
            for record in given.records:
                record.partition_key  # noqa: B018 -- a reader does at least this
                self.report.note(self.shard_id, record.binary_data)
            self.report.flush()
            if time.monotonic() >= self.checkpoint_at:
                given.checkpointer.checkpoint()
                self.checkpoint_at = time.monotonic() + CHECKPOINT_SECONDS

        def lease_lost(self, _):
            pass

        def shard_ended(self, given):
            given.checkpointer.checkpoint()

        def shutdown_requested(self, given):
            given.checkpointer.checkpoint()

    kcl.KCLProcess(Reader()).run()


async def ours(given):
    from anabranch import CheckpointSettings, Consumer, ConsumerSettings

    report = Report(given.reports)
    settings = ConsumerSettings(checkpoints=CheckpointSettings(interval=CHECKPOINT_SECONDS))
    consumer = Consumer(
        given.stream,
        app=given.stream,
        leases=given.leases,
        read=given.read,
        start="trim_horizon",
        order="shard",
        settings=settings,
    )

    async def handle(record):
        record.partition_key  # noqa: B018 -- as above
        report.note(record.shard_id, record.data)

    async def handle_batch(records):
        for record in records:
            record.partition_key  # noqa: B018 -- as above
            report.note(record.shard_id, record.data)

    async def flush():
        while True:
            await asyncio.sleep(FLUSH_SECONDS)
            report.flush()

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(flush())
        tasks.create_task(consumer.run_batches(handle_batch) if given.batches else consumer.run(handle))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("kind", choices=["theirs", "ours"])
    parser.add_argument("reports")
    parser.add_argument("stream", nargs="?")
    parser.add_argument("read", nargs="?")
    parser.add_argument("leases", nargs="?")
    parser.add_argument("--batches", action="store_true")
    arguments = parser.parse_args()
    if arguments.kind == "theirs":
        theirs(arguments.reports)
    else:
        asyncio.run(ours(arguments))
