"""Workers with more or fewer streams of one application run side by side, as while a deploy replaces one by one."""

import asyncio

from anabranch._model.leases import LeaseRow, MemberRow
from anabranch.application import Application
from anabranch.reasons import StreamNotRead
from anabranch.stores import MemoryLeaseStore
from memory_rows import stored

from simulated_stream import now_ms, run, stream_world, until


class Fleet:
    def __init__(self, world):
        self.world = world
        self.store = MemoryLeaseStore()
        self.handled = {}
        """Data of the records that each worker has handled, with their streams."""
        self.running = {}

    def create(self, stream, shards):
        self.world.kinesis.state.call("CreateStream", {"StreamName": stream, "ShardCount": shards}, now_ms=now_ms())

    def put(self, stream, count=40):
        for number in range(count):
            request = {"StreamName": stream, "PartitionKey": f"key-{number}", "Data": f"{stream} {number}".encode()}
            self.world.kinesis.state.call("PutRecord", request, now_ms=now_ms())

    def start(self, name, *streams):
        consumer = self.world.consumer(streams, app="billing", leases=self.store, start="trim_horizon")
        handled = self.handled[name] = []
        task = asyncio.create_task(
            consumer.run(lambda record: handled.append((record.stream, record.data)), handle_signals=False)
        )
        self.running[name] = (consumer, task)

    async def stop(self, name):
        consumer, task = self.running.pop(name)
        await consumer.stop()
        await task

    def shares(self):
        """How many unfinished shards of each stream each live member holds."""
        members = {row.member_id: row for row in stored(self.store, MemberRow) if row.state == "live"}
        counts = {}
        for row in stored(self.store, LeaseRow):
            name = row.key.stream_key.split(":")[1]
            if row.owner in members:
                key = (len(members[row.owner].streams), name)
                counts[key] = counts.get(key, 0) + 1
        return counts

    def all_handled(self):
        return [record for some in self.handled.values() for record in some]

    async def status(self):
        async with Application("billing", leases=self.store) as application:
            return await application.status()


def test_a_stream_is_added_worker_by_worker_and_each_takes_only_shards_of_what_it_reads():
    async def main():
        async with stream_world(4) as world:
            fleet = Fleet(world)
            fleet.create("payments", 4)
            fleet.start("old", "orders")
            await until(lambda: fleet.shares() == {(1, "orders"): 4}, "the old worker's shards")
            fleet.start("new", "orders", "payments")
            # The old worker cannot read payments, so it keeps all of orders: four shards each.
            await until(lambda: fleet.shares() == {(1, "orders"): 4, (2, "payments"): 4}, "fair shares")
            fleet.put("orders")
            fleet.put("payments")
            await until(lambda: len(fleet.all_handled()) == 80, "all records")
            assert len(set(fleet.all_handled())) == 80
            assert {stream for stream, _ in fleet.handled["old"]} == {"orders"}
            await fleet.stop("old")
            await until(lambda: fleet.shares() == {(2, "orders"): 4, (2, "payments"): 4}, "what the old one left")
            await fleet.stop("new")

    run(main)


def test_a_stream_that_no_live_worker_reads_any_more_waits_with_that_reason_and_keeps_its_position():
    async def main():
        async with stream_world(2) as world:
            fleet = Fleet(world)
            fleet.create("payments", 2)
            fleet.put("payments")
            fleet.start("old", "orders", "payments")
            await until(lambda: len(fleet.all_handled()) == 40, "the payments")
            fleet.start("new", "orders")
            await until(lambda: (1, "orders") in fleet.shares(), "the new worker's share")
            await fleet.stop("old")
            fleet.put("payments", 5)
            await until(lambda: fleet.shares() == {(1, "orders"): 2}, "the new worker's shards")
            status = await fleet.status()
            reasons = {(shard.stream, shard.state, shard.reason) for shard in status.shards if shard.stream != "orders"}
            assert reasons == {("payments", "unowned", StreamNotRead(stream="payments"))}
            await asyncio.sleep(100)
            assert len(fleet.all_handled()) == 40
            fleet.start("back", "payments")
            await until(lambda: len(fleet.handled["back"]) == 5, "what came meanwhile, and nothing twice")
            await fleet.stop("back")
            await fleet.stop("new")

    run(main)


def test_a_dead_owners_shards_go_to_a_worker_that_reads_their_stream():
    async def main():
        async with stream_world(3) as world:
            fleet = Fleet(world)
            fleet.create("payments", 3)
            fleet.start("both", "orders", "payments")
            fleet.start("payments", "payments")
            fleet.start("orders", "orders")
            await until(lambda: sum(fleet.shares().values()) == 6, "all shards")
            _, task = fleet.running.pop("both")
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await until(lambda: fleet.shares() == {(1, "orders"): 3, (1, "payments"): 3}, "their readers")
            fleet.put("orders")
            fleet.put("payments")
            await until(lambda: len(fleet.all_handled()) == 80, "all records")
            assert {stream for stream, _ in fleet.handled["orders"]} == {"orders"}
            assert {stream for stream, _ in fleet.handled["payments"]} == {"payments"}
            await fleet.stop("payments")
            await fleet.stop("orders")

    run(main)
