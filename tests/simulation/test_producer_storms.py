"""The whole producer, engine and facade, in seeded storms: shuffled callbacks, lost and late responses, splits, merges,
and cancelled puts. What a consumer reads afterwards is compared with the reported outcomes.
"""

import asyncio
import random

import pytest
from memory_kinesis import MemoryKinesis
from write_outcomes import WriteOutcomes

from anabranch._engine.writing.writer import Writer
from anabranch.config import ProducerSettings
from anabranch.errors import BufferFull, DeliveryFailed, ThrottledError, TransportError, UnavailableError
from anabranch.testing.loop import Deadlock, run

SEEDS = 80
SEEDS_FOR_A_VARIANT = 40
BUFFER_BYTES = 1 << 20
THROTTLED = ThrottledError("slow", operation="PutRecords", code="LimitExceededException")
UNAVAILABLE = UnavailableError("oops", operation="PutRecords", code="InternalFailure", status=500)


class Storm:
    def __init__(self, seed):
        self.rng = rng = random.Random(seed)
        self.kinesis = MemoryKinesis({"orders": rng.choice([1, 2, 4])}, latency=0, seed=seed)
        self.kinesis._travel = self.travel
        self.kinesis.before_put = lambda entries: self.maybe(THROTTLED, TransportError("refused", maybe_sent=False))
        self.kinesis.after_put = lambda entries: self.maybe()
        self.kinesis.before_list = lambda: TransportError("no listing") if rng.random() < self.trouble * 3 else None
        self.trouble = rng.choice([0.0, 0.1, 0.3])
        self.order = rng.choice(["key", "key", "none"])
        self.undelivered = []
        self.deliveries = []
        self.outcomes = WriteOutcomes(keeps_order=self.order == "key")
        self.number = 0
        self.peak_bytes = 0

    async def travel(self):
        await asyncio.sleep(self.rng.random() * 0.05)

    def maybe(self, *certain):
        if self.rng.random() >= self.trouble / 2:
            return None
        return self.rng.choice([TransportError("cut"), UNAVAILABLE, *certain])

    async def application(self, producer, name):
        rng = self.rng
        for _ in range(rng.randrange(5, 30)):
            await asyncio.sleep(rng.random() * 0.05)
            key = f"{name}-{rng.randrange(0, 3)}"
            async with asyncio.TaskGroup() as callers:  # several at once for the same key, now and then
                for _ in range(rng.choice([1, 1, 3])):
                    callers.create_task(self.put(producer, key))

    async def put(self, producer, key):
        rng = self.rng
        number, self.number = self.number, self.number + 1
        data = b"%d:" % number + b"x" * rng.choice([0, 50, 20_000, 200_000])
        self.outcomes.put(data, key)
        try:
            if rng.random() < 0.2:
                delivery = producer.put_nowait(data, key)
            else:
                delivery = await producer.put(data, key, timeout=rng.choice([None, None, 0.01]))
        except BufferFull:
            self.outcomes.refused(data)
            return
        self.deliveries.append(delivery)
        if rng.random() < 0.3:
            await delivery

    async def weather(self):
        for _ in range(self.rng.randrange(0, 12)):
            await asyncio.sleep(self.rng.random() * 0.3)
            open_count = sum(shard.is_open for shard in self.kinesis.shards())
            if self.rng.random() < 0.5 and open_count > 1:
                self.kinesis.merge()
            elif open_count < 8:
                self.kinesis.split()

    async def watch(self, producer):
        while True:
            self.peak_bytes = max(self.peak_bytes, producer.buffered_bytes)
            await asyncio.sleep(0.001)

    async def main(self):
        rng = self.rng
        producer = self.kinesis.producer(
            order=self.order,
            aggregate=rng.choice(["shard", "shard", "key", None]),
            linger=rng.choice([0.0, 0.05]),
            buffer_bytes=BUFFER_BYTES,
            settings=ProducerSettings(requests_in_flight=rng.choice([1, 3, 8]), after_failure="continue"),
        )
        async with asyncio.TaskGroup() as tasks:
            watching = tasks.create_task(self.watch(producer))
            async with asyncio.TaskGroup() as work:
                work.create_task(self.weather())
                for name in range(3):
                    work.create_task(self.application(producer, name))
                if rng.random() < 0.5:
                    work.create_task(self.flush(producer))
            self.trouble = 0.0
            await producer.close(deadline=None)
            watching.cancel()

    async def flush(self, producer):
        await asyncio.sleep(self.rng.random())
        before = self.deliveries.copy()
        report = await producer.flush()
        assert report.complete
        assert all(delivery.done() for delivery in before), "a flush is a barrier"

    def check(self):
        assert self.peak_bytes <= BUFFER_BYTES, "the buffer was over its limit"
        for delivery in self.deliveries:
            assert delivery.done(), "a record was never settled"
            assert delivery.result().delivered, delivery.result().error
            self.outcomes.told(0, delivery.result())
        for position, shard_id, _, data in self.kinesis.placed_records():
            self.outcomes.read(data, shard_id, position)
        self.outcomes.ended(0)
        assert not self.outcomes.violations, self.outcomes.violations[0]


def storm(seed):
    one = Storm(seed)
    run(one.main, seed=seed, order="shuffle" if seed % 2 else "fifo")
    one.check()


@pytest.mark.parametrize("first", range(0, SEEDS, 20))
def test_every_put_is_told_the_truth_in_any_storm(first):
    for seed in range(first, first + 20):
        try:
            storm(seed)
        except Exception as error:
            raise AssertionError(f"storm({seed}): {error!r}") from error


@pytest.mark.long
@pytest.mark.timeout(300)
def test_three_hundred_more_storms():
    for seed in range(SEEDS, SEEDS + 300):
        storm(seed)


def room_is_given_to_anybody(patch):
    """Waiters are woken to try again instead of getting space in their order."""
    plain = Writer._admit

    def admit(self):
        self._queue.rotate(1)
        plain(self)

    patch.setattr(Writer, "_admit", admit)


def the_buffer_has_no_limit(patch):
    plain = Writer.__init__

    def init(self, *arguments, buffer_bytes, **options):
        plain(self, *arguments, buffer_bytes=buffer_bytes * 3, **options)

    patch.setattr(Writer, "__init__", init)


def flush_does_not_wait(patch):
    async def flush(self, deadline_ms):
        return True

    patch.setattr(Writer, "_flush", flush)


VARIANTS = {
    "space is given to anybody": room_is_given_to_anybody,
    "the buffer has no limit": the_buffer_has_no_limit,
    "flush does not wait": flush_does_not_wait,
}


@pytest.mark.parametrize("name", VARIANTS)
def test_storms_find_an_engine_in_which(name, monkeypatch):
    VARIANTS[name](monkeypatch)
    for seed in range(SEEDS_FOR_A_VARIANT):
        try:
            storm(seed)
        except (AssertionError, Deadlock, DeliveryFailed, ExceptionGroup):
            return
    pytest.fail(f"no storm of {SEEDS_FOR_A_VARIANT} showed that {name}")
