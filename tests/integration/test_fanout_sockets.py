"""Fan-out over real sockets: HTTP/1.1 and HTTP/2, many subscriptions on one connection, which really end."""

import asyncio

import pytest

from anabranch import ConsumerSettings, FanOutSettings
from anabranch.events import FanOutFellBack
from anabranch.local.state.subscription import Subscription
from anabranch.stores.memory import MemoryLeaseStore

from stream_world import QUICK, check_order, kinds, numbers, run, stream_world, until

KEYS = [f"user-{i}" for i in range(40)]
TRANSPORTS = pytest.mark.parametrize("tls", [pytest.param(False, marks=pytest.mark.long), True], ids=["http1", "http2"])


def fanout(world, store=None, **options):
    return world.consumer(
        app="billing", leases=store or MemoryLeaseStore(), read="fanout", start="trim_horizon", **options
    )


@TRANSPORTS
def test_everything_comes_once_and_in_order_across_renewals_resharding_and_a_restart(tls, monkeypatch):
    async def main():
        async with stream_world(4, tls=tls, time_scale=0.002) as world:  # a subscription lasts 0.6 s
            if tls:
                monkeypatch.setenv("AWS_CA_BUNDLE", str(world.kinesis.certificate_path))
            store, seen, renewals = MemoryLeaseStore(), [], 0
            for round_number in range(2):
                consumer = fanout(world, store)

                async def handle(record):
                    seen.append(record)

                running = asyncio.create_task(consumer.run(handle))
                for _ in range(10):
                    world.put(KEYS)
                    await asyncio.sleep(0.1)
                if round_number == 0:
                    world.split()
                    world.put(KEYS)
                    world.merge()
                world.put(KEYS)
                await until(lambda: len(seen) >= world.put_count, "all records")
                renewals += sum(shard.subscription.renewal_count for shard in consumer.status().shards)
                await consumer.stop()
                await running
            assert sorted(numbers(seen)) == list(range(world.put_count))
            check_order(seen)
            assert renewals > 2
            assert not any(not one.is_over for one in world.kinesis.state.account.subscriptions.values())

    run(main)


@pytest.mark.long
def test_two_hundred_subscriptions_share_a_few_connections(monkeypatch):
    async def main():
        async with stream_world(200, tls=True) as world:
            monkeypatch.setenv("AWS_CA_BUNDLE", str(world.kinesis.certificate_path))
            consumer, seen = fanout(world), []

            async def handle(record):
                seen.append(record)

            running = asyncio.create_task(consumer.run(handle))
            await until(lambda: _active(consumer) == 200, "200 subscriptions")
            assert len(consumer._ports.kinesis._streams._connections) == 13  # 16 on each
            world.put([f"key-{n}" for n in range(2_000)])
            await until(lambda: len(seen) == 2_000, "all records")
            await consumer.stop()
            await running

    run(main)


def _active(consumer):
    shards = consumer.status().shards
    return sum(shard.subscription is not None and shard.subscription.state == "active" for shard in shards)


@TRANSPORTS
def test_a_hand_off_closes_the_subscription_so_that_the_next_owner_gets_it(tls, monkeypatch):
    async def main():
        # A subscription can be replaced after 50 ms instead of 5 s.
        async with stream_world(2, tls=tls, time_scale=0.01) as world:
            if tls:
                monkeypatch.setenv("AWS_CA_BUNDLE", str(world.kinesis.certificate_path))
            store, seen, happened, taken_over = MemoryLeaseStore(), [], [], []
            monkeypatch.setattr(Subscription, "end", lambda *_: taken_over.append("by the next owner"))
            settings = ConsumerSettings(
                leases=QUICK.leases, polling=QUICK.polling, fanout=FanOutSettings(consumer_name="billing")
            )

            async def handle(record):
                seen.append(record)

            first = fanout(world, store, settings=settings)
            one = asyncio.create_task(first.run(handle))
            await until(lambda: _active(first) == 2, "two subscriptions")
            second = fanout(world, store, settings=settings, on_event=happened.append)
            two = asyncio.create_task(second.run(handle))
            await until(lambda: (_active(first), _active(second)) == (1, 1), "one subscription each")
            world.put(KEYS)
            await until(lambda: len(seen) == len(KEYS), "all records")
            await first.stop()
            await second.stop()
            await asyncio.gather(one, two)
            check_order(seen)
            assert not taken_over
            assert not kinds(happened, FanOutFellBack)

    run(main)
