"""Single throttled records cost their key a round trip or two, but do not slow the stream down.

In virtual time only round trips (20 ms) and pauses take time.
"""

import asyncio
import random
from operator import itemgetter

import pytest
from memory_kinesis import MemoryKinesis, ProducerOver, warm_up

from anabranch.config import ProducerSettings
from anabranch.errors import TransportError
from anabranch.events import WriteThrottled
from anabranch.producer import ProducerPorts
from anabranch.testing.loop import run

RECORDS = 2_000
KEYS = 100
ROUND_TRIP_SECONDS = 0.02


class Run:
    """A producer that writes all records at once, and its results."""

    def __init__(self, *, throttled=0.0, seed=1, shards=4, records=RECORDS, keys=KEYS, reshard_seconds=None,
                 lists=True, **options):  # fmt: skip
        rng = random.Random(seed)
        self.kinesis = MemoryKinesis({"orders": shards}, latency=ROUND_TRIP_SECONDS)
        if throttled:
            self.kinesis.is_throttled = lambda entry: entry.data != b"warm" and rng.random() < throttled
        if not lists:
            self.kinesis.before_list = lambda: TransportError("no listing")
        self.puts = [(f"k{number % keys}", b"%d" % number) for number in range(records)]
        self.reshard_seconds = reshard_seconds
        self.options = {"aggregate": None} | options
        self.events = []
        run(self.main, seed=seed)

    async def main(self):
        loop = asyncio.get_running_loop()
        async with self.kinesis.producer(on_event=self.events.append, **self.options) as producer:
            await warm_up(producer)
            resharding = asyncio.ensure_future(self.reshard())
            started = loop.time()
            deliveries = await producer.put_many(self.puts)
            self.results = [await delivery for delivery in deliveries]
            self.seconds = loop.time() - started
            resharding.cancel()

    async def reshard(self):
        while self.reshard_seconds is not None:
            await asyncio.sleep(self.reshard_seconds)
            self.kinesis.split()
            await asyncio.sleep(self.reshard_seconds)
            self.kinesis.merge()

    def check(self):
        """Every record is in the stream once, each key is in order, and each refusal cost one attempt."""
        assert all(result.delivered for result in self.results)
        assert sum(len(result.attempts) for result in self.results) == len(self.puts) + self.kinesis.slots_refused
        stored = [record for record in self.kinesis.records() if record[1] != b"warm"]
        assert len(stored) == len(self.puts)
        if self.options.get("order") != "none":
            by_key = itemgetter(0)  # sorting is stable and keeps the order within each key
            assert sorted(stored, key=by_key) == sorted(self.puts, key=by_key)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("throttled, times", [(0.02, 1.5), (0.1, 2.0)])
def test_random_throttling_does_not_set_the_pace(throttled, times, seed):
    calm, troubled = Run(), Run(throttled=throttled, seed=seed)
    troubled.check()
    assert troubled.kinesis.slots_refused > RECORDS * throttled / 2
    assert troubled.seconds <= calm.seconds * times


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    "options",
    [
        {"aggregate": "shard", "keys": 2_000, "records": 40_000},
        {"aggregate": "key", "keys": 400, "records": 8_000},
        {"order": "none"},
        {"lists": False},
    ],
    ids=str,
)
def test_random_throttling_costs_a_few_round_trips_in_every_mode(options, seed):
    calm, troubled = Run(**options), Run(throttled=0.02, seed=seed, **options)
    if options.get("aggregate") is None:
        troubled.check()
    assert all(result.delivered for result in troubled.results)
    assert troubled.seconds <= calm.seconds + 10 * ROUND_TRIP_SECONDS


@pytest.mark.parametrize("throttled", [0.02, 0.1])
def test_resharding_all_the_time_under_random_throttling_delivers_everything(throttled):
    troubled = Run(throttled=throttled, reshard_seconds=0.3, records=4_000, keys=20, delivery_timeout=10)
    troubled.check()
    assert len(troubled.kinesis.shards()) > 8


def test_a_throttled_record_costs_its_key_a_round_trip_for_each_refusal_and_other_keys_none():
    async def main():
        async with kinesis.producer(aggregate=None) as producer:
            await warm_up(producer)
            await asyncio.gather(*(producer.put_and_wait(b"x", f"k{number}") for number in range(20)))
            started = asyncio.get_running_loop().time()

            async def put(data, key):
                result = await producer.put_and_wait(data, key)
                round_trips = (asyncio.get_running_loop().time() - started) / ROUND_TRIP_SECONDS
                return len(result.attempts), round(round_trips, 3)

            first, second, *others = await asyncio.gather(
                put(b"first", "k0"), put(b"second", "k0"), *(put(b"x", f"k{number}") for number in range(1, 20))
            )
            assert (first, second) == ((3, 3.0), (1, 4.0))
            assert others == [(1, 1.0)] * 19

    refusals = [True, True]
    kinesis = MemoryKinesis(latency=ROUND_TRIP_SECONDS)
    kinesis.is_throttled = lambda entry: entry.data == b"first" and bool(refusals) and refusals.pop()
    run(main)


@pytest.mark.parametrize("keys", [1, 100, 2_000])
@pytest.mark.parametrize("lists", [True, False])
def test_a_shard_that_refuses_everything_is_not_stormed(keys, lists):
    async def main():
        async with kinesis.producer(aggregate=None, on_event=events.append) as producer:
            await producer.put_many([(f"k{number % keys}", b"x") for number in range(1_000)])
            await producer.flush()
            kinesis.is_throttled = lambda _: True
            await producer.put_many([(f"k{number % keys}", b"x") for number in range(1_000)])
            before = kinesis.calls["PutRecords"]
            await asyncio.sleep(10)
            asked.append(kinesis.calls["PutRecords"] - before)
            kinesis.is_throttled = None
            await producer.flush()

    asked, events = [], []
    kinesis = MemoryKinesis(latency=ROUND_TRIP_SECONDS)
    if not lists:
        kinesis.before_list = lambda: TransportError("no listing")
    run(main)
    # To send all again after each round trip would take 500 calls, or 1,000 with more keys than fit in one. The pauses
    # of a shard double; those of the stream, where no shard is known, do not.
    assert asked[0] <= (100 if lists else 300)
    if lists:
        assert any(isinstance(event, WriteThrottled) for event in events)


def test_one_full_shard_among_many_unknown_ones_is_not_stormed():
    async def main():
        async with kinesis.producer(aggregate=None) as producer:
            await producer.put_many([(f"hot{number}", b"x") for number in range(10)])
            for _ in range(100):
                await producer.put_many([(f"k{number}", b"x") for number in range(100)])
                await asyncio.sleep(ROUND_TRIP_SECONDS)
            kinesis.is_throttled = None
            await producer.flush()

    kinesis = MemoryKinesis({"orders": 16}, latency=ROUND_TRIP_SECONDS)
    kinesis.before_list = lambda: TransportError("no listing")
    kinesis.is_throttled = lambda entry: entry.partition_key.startswith("hot")
    run(main)
    assert kinesis.slots_refused <= 500  # 1,000 if each of them was sent again after each round trip


def test_producers_that_share_a_full_shard_waste_few_attempts_and_finish_together():
    async def main():
        async def write(number):
            ports = ProducerPorts(kinesis, kinesis.clock, random.Random(number))
            async with ProducerOver(ports, "orders", aggregate=None, delivery_timeout=600) as producer:
                await warm_up(producer)
                await producer.put_many([(f"p{number}k{n % KEYS}", b"x") for n in range(RECORDS)])
                await producer.flush()
                finished.append(asyncio.get_running_loop().time() - 10)

        await asyncio.gather(*(write(number) for number in range(3)))

    async def travel():  # calls of different producers arrive in any order
        await asyncio.sleep(rng.uniform(0.005, 0.015))

    rng, finished = random.Random(3), []
    kinesis = MemoryKinesis(limits="aws")
    kinesis._travel = travel
    run(main)
    # 6,000 records, of which a burst of 1,000 passes at once: the shard needs five seconds.
    assert max(finished) <= 7.5
    assert kinesis.slots_refused <= 0.25 * 3 * RECORDS


def write_together(settings, *, records=1_500, size=10, producers=4, knows_shards=True, before_list=None):
    """Producers that know nothing of each other write to one shard of a server that enforces AWS's limits."""

    async def main():
        async def write(number):
            ports = ProducerPorts(kinesis, kinesis.clock, random.Random(number))
            options = {"aggregate": None, "delivery_timeout": 600, "settings": settings}
            async with ProducerOver(ports, "orders", **options) as producer:
                if knows_shards:
                    await warm_up(producer)
                await producer.put_many([(f"p{number}k{n % KEYS}", bytes(size)) for n in range(records)])
                await producer.flush()

        await asyncio.gather(*(write(number) for number in range(producers)))

    kinesis = MemoryKinesis(limits="aws")
    kinesis.before_list = before_list
    run(main)
    return kinesis


def written_in_a_second(kinesis):
    """The most records and bytes that a shard got in any second after the warm-up."""
    arrivals = [
        (record["ApproximateArrivalTimestamp"], len(record["Data"]) + len(record["PartitionKey"]))
        for _, record in kinesis.stored()
    ]
    most_records = most_bytes = 0
    for start, _ in arrivals[:: max(1, len(arrivals) // 200)]:
        sizes = [size for at, size in arrivals if start <= at < start + 1]
        most_records, most_bytes = max(most_records, len(sizes)), max(most_bytes, sum(sizes))
    return most_records, most_bytes


def test_producers_whose_record_limits_fit_into_the_shard_are_never_refused():
    assert write_together(ProducerSettings()).slots_refused > 0
    limited = write_together(ProducerSettings(shard_records_per_second=120))
    assert limited.slots_refused == 0
    assert written_in_a_second(limited)[0] <= 4 * (120 + 120)  # what was saved up for a second, and a second's


def test_producers_whose_byte_limits_fit_into_the_shard_are_never_refused():
    records = {"records": 300, "size": 50_000}
    assert write_together(ProducerSettings(), **records).slots_refused > 0
    limited = write_together(ProducerSettings(shard_bytes_per_second=240_000), **records)
    assert limited.slots_refused == 0
    assert written_in_a_second(limited)[1] <= 4 * (240_000 + 240_000 + 50_100)


@pytest.mark.parametrize("before_list", [None, lambda: TransportError("no listing")], ids=["soon", "never"])
def test_the_limits_hold_before_the_shards_are_listed(before_list):
    fresh = {"knows_shards": False, "before_list": before_list}
    limited = write_together(ProducerSettings(shard_records_per_second=120), **fresh)
    assert limited.slots_refused == 0
    assert written_in_a_second(limited)[0] <= 4 * (120 + 120)
    limited = write_together(ProducerSettings(shard_bytes_per_second=240_000), records=150, size=50_000, **fresh)
    assert limited.slots_refused == 0
    assert written_in_a_second(limited)[1] <= 4 * (240_000 + 240_000 + 50_100)
    limited = write_together(ProducerSettings(shard_share=0.12), **fresh)
    assert limited.slots_refused == 0


def test_the_limits_are_those_of_each_shard():
    """Four shards take four times as much in the same time."""

    async def main():
        settings = ProducerSettings(shard_records_per_second=100)
        async with kinesis.producer(aggregate=None, settings=settings) as producer:
            await warm_up(producer)
            started = asyncio.get_running_loop().time()
            await producer.put_many([(f"k{number}", b"x") for number in range(2_000)])
            await producer.flush()
            seconds.append(asyncio.get_running_loop().time() - started)

    seconds = []
    for shards in (1, 4):
        kinesis = MemoryKinesis({"orders": shards})
        run(main)
    one, four = seconds
    assert 18 <= one <= 21
    assert 3.5 <= four <= 6
