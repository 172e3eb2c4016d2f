"""Bytes of memory for each shard, record and delivery, as Python's allocator counts them (tracemalloc).

In virtual time and without sockets, so that nothing else is counted: of a shard, what the engine keeps for it; of a
record of 100 bytes, what a response becomes, and the `Record` that a handler gets; of a delivery, what the producer
keeps until the record is sent, and what is left when its result is known. Both hold the caller's bytes, 133 of them as
an object of Python.
"""

import asyncio
import gc
import json
import random
import tracemalloc
from base64 import b64encode
from itertools import count

import measure
import scale
from anabranch._core.handling.batches import BatchLimits
from anabranch._core.reading.pace import PaceLimits
from anabranch._core.reading.window import Unpacker
from anabranch._engine.consumer_run import EngineMode
from anabranch._ports import Ports
from anabranch._wire import bodies
from anabranch._wire.messages import PutRecordsResponse, PutRecordsResultEntry
from anabranch.producer import Producer, ProducerPorts
from anabranch.stores.memory import MemoryLeaseStore
from anabranch.testing import loop as simulation

SHARDS = (200, 1_200)
RECORDS = 10_000
DELIVERIES = 20_000
KEYS = [f"user-{number:011}" for number in range(500)]


def allocated() -> int:
    gc.collect()
    return tracemalloc.get_traced_memory()[0]


def bytes_of_shards(shard_count: int) -> int:
    async def main() -> int:
        clock = scale.VirtualClock()
        stream = scale.Stream(shard_count, clock, busy=False)
        before = allocated()  # the listing is there
        ports = Ports(
            kinesis=stream,  # type: ignore[arg-type]
            store=MemoryLeaseStore(),
            clock=clock,
            entropy=random.Random(1),
            emit=lambda _: None,
        )
        pace = PaceLimits(idle_interval_ms=1000)
        run = scale.run_with(ports, "orders", EngineMode(batches=BatchLimits()), pace=pace, start="latest")
        await run.start()
        while len(run.sessions) < shard_count:  # noqa: ASYNC110 -- virtual time
            await asyncio.sleep(1.0)
        await asyncio.sleep(scale.SETTLE_SECONDS)
        found = allocated() - before
        await run.stop(5)
        return found

    return simulation.run(main)


def bytes_of_records() -> tuple[float, float]:
    """As read, and as `Record` in addition."""
    records = [
        {
            "SequenceNumber": f"{number:056}",
            "ApproximateArrivalTimestamp": 1_700_000_000.125 + number,
            "Data": b64encode(b"%0100d" % number).decode(),
            "PartitionKey": f"user-{number:011}",
        }
        for number in range(RECORDS)
    ]
    body = json.dumps({"Records": records, "NextShardIterator": "next", "MillisBehindLatest": 0}).encode()
    before = allocated()
    read = bodies.decode_get_records(body, server_seconds=0.0).records
    as_read = allocated()
    made = [some.records for some in Unpacker("orders", "shardId-000000000000", None).unpack(read, None)]
    as_made = allocated()
    assert sum(map(len, made)) == RECORDS
    return (as_read - before) / RECORDS, (as_made - as_read) / RECORDS


def bytes_of_deliveries() -> tuple[float, float]:
    """Buffered, and settled."""

    class MemoryProducer(Producer):
        def _open_ports(self) -> ProducerPorts:
            return ProducerPorts(service, clock, random.Random(1))

    class Service(scale.Stream):
        async def put_records(self, stream, entries):  # noqa: ARG002 -- it takes all
            await asyncio.sleep(0.005)
            shard_id = self.shards[0].shard_id
            return PutRecordsResponse([PutRecordsResultEntry(f"{next(numbers):056}", shard_id) for _ in entries])

    async def main() -> tuple[float, float]:
        async with MemoryProducer("orders", linger=1.0) as producer:
            await producer.put_and_wait(b"warm", "up")
            before = allocated()
            deliveries = [producer.put_nowait(b"%0100d" % n, KEYS[n % 500]) for n in range(DELIVERIES)]
            buffered = allocated()
            for delivery in deliveries:
                assert (await delivery).delivered
            return (buffered - before) / DELIVERIES, (allocated() - before) / DELIVERIES

    clock, numbers = scale.VirtualClock(), count(1)
    service = Service(1, clock, busy=False)
    return simulation.run(main)


def main() -> None:
    tracemalloc.start()
    few, many = (bytes_of_shards(shard_count) for shard_count in SHARDS)
    as_read, as_record = bytes_of_records()
    buffered, settled = bytes_of_deliveries()
    print(f"{'memory':56}{'bytes':>8}")
    for name, amount in {
        "shard, idle": (many - few) / (SHARDS[1] - SHARDS[0]),
        "record of 100 bytes, read and not handed out yet": as_read,
        "the same as a `Record`, more": as_record,
        "delivery, buffered with its 100 bytes": buffered,
        "delivery, settled, with its 100 bytes": settled,
    }.items():
        measure.value(name, amount, "bytes")
        print(f"  {name:54}{amount:8,.0f}")


if __name__ == "__main__":
    main()
