"""A consumer that reads with fan-out, in virtual time: over the local server's subscriptions and scripted faults."""

import asyncio
import sys

import pytest
from msgspec.structs import replace as replace_struct

from anabranch import Budget, ConsumerSettings, FanOutSettings, LeaseSettings, reasons
from anabranch.errors import ConfigurationError, FanOutError
from anabranch.events import (
    ConsumerDeregistered,
    ConsumerRegistered,
    DataLost,
    FanOutFellBack,
    FanOutReturned,
    SubscriptionEnded,
)
from anabranch.stores import MemoryLeaseStore

import simulated_stream
from simulated_stream import check_order, now, now_ms, numbers, run, stream_world, until
from stream_world import QUICK

KEYS = [f"user-{n}" for n in range(16)]


class Reading:
    """A consumer that collects its records until told to stop."""

    def __init__(self, world, **options):
        self.records, self.events = [], []
        self.options = {"start": "trim_horizon", "app": "billing", "read": "fanout", "leases": MemoryLeaseStore()}
        self.options |= options
        self.consumer = world.consumer(on_event=self.events.append, **self.options)

    async def __aenter__(self):
        self._task = asyncio.create_task(self.consumer.run(self.handle))
        return self

    async def handle(self, record):
        self.records.append(record)

    async def __aexit__(self, kind, error, trace):
        if kind is None:
            await self.consumer.stop()
            self.report = await self._task
        else:
            self._task.cancel()

    def kinds(self, kind):
        return [event for event in self.events if isinstance(event, kind)]

    @property
    def states(self):
        return [shard.subscription.state for shard in self.consumer.status().shards if shard.subscription]

    async def has(self, count, seconds=120):
        await until(lambda: len(self.records) >= count, f"{count} records, not {len(self.records)}", seconds)

    def check(self, count):
        """Every record once, in the order of its key."""
        assert sorted(numbers(self.records)) == list(range(count))
        check_order(self.records)


def consumers(world):
    arn = world.call("DescribeStreamSummary")["StreamDescriptionSummary"]["StreamARN"]
    found = world.kinesis.state.call("ListStreamConsumers", {"StreamARN": arn}, now_ms=now_ms())["Consumers"]
    return {consumer["ConsumerName"]: consumer for consumer in found}


def refusals(world):
    """Makes the server remember the subscriptions that it refuses; returns them."""
    state = world.kinesis.state
    if not hasattr(state, "refused"):
        state.refused, subscribe = [], state.subscribe

        def remembered(request, **options):
            try:
                return subscribe(request, **options)
            except Exception as error:
                state.refused.append(error)
                raise

        state.subscribe = remembered
    return state.refused


async def write_for(world, seconds, every=0.5):
    for _ in range(round(seconds / every)):
        world.put(KEYS)
        await asyncio.sleep(every)


def fault_free(world):
    world.kinesis.faults.clear()


# registration


def test_an_application_registers_one_consumer_and_keeps_it():
    async def main():
        async with stream_world(shards=2) as world:
            store = MemoryLeaseStore()
            settings = ConsumerSettings(leases=QUICK.leases, fanout=FanOutSettings(consumer_name="billing"))
            for _ in range(2):
                async with Reading(world, leases=store, settings=settings) as reading:
                    world.put(KEYS)
                    await reading.has(len(KEYS))
            assert list(consumers(world)) == ["billing"]
            assert len(reading.kinds(ConsumerRegistered)) == 1

    run(main)


def test_workers_that_start_together_share_one_consumer():
    async def main():
        async with stream_world(shards=4, state_delay=3.0) as world:
            store = MemoryLeaseStore()
            await asyncio.sleep(5)
            settings = ConsumerSettings(leases=QUICK.leases, fanout=FanOutSettings(consumer_name="billing"))
            async with (
                Reading(world, leases=store, settings=settings) as one,
                Reading(world, leases=store, settings=settings) as other,
            ):
                await until(lambda: {*one.states, *other.states} == {"active"}, "subscriptions")
                world.put(KEYS * 4)
                await until(lambda: len(one.records) + len(other.records) == 64, "all records")
            assert list(consumers(world)) == ["billing"]

    run(main)


@pytest.mark.parametrize("options", [{"app": None}, {"app": "billing", "leases": "memory://"}])
def test_a_consumer_that_no_later_run_could_use_is_removed_on_exit(options):
    async def main():
        async with stream_world() as world:
            async with Reading(world, **options) as reading:
                world.put(KEYS)
                await reading.has(16)
                (name,) = consumers(world)
                assert name.startswith("anabranch-")
            assert consumers(world) == {}
            assert len(reading.kinds(ConsumerDeregistered)) == 1

    run(main)


@pytest.mark.parametrize("options", [{}, {"app": "billing", "leases": "memory://"}])
def test_a_failed_run_leaves_no_consumer_that_no_later_run_could_use(options):
    async def main():
        async with stream_world() as world:
            world.put(["a"])

            async def fail():
                async with world.consumer(read="fanout", start="trim_horizon", **options) as consumer:
                    async for _ in consumer:
                        raise RuntimeError("enough")

            with pytest.raises(RuntimeError, match="enough"):
                await fail()
            assert consumers(world) == {}

    run(main)


def test_the_last_worker_to_stop_removes_the_consumer():
    async def main():
        async with stream_world(shards=2) as world:
            store = MemoryLeaseStore()
            settings = ConsumerSettings(
                leases=QUICK.leases, fanout=FanOutSettings(consumer_name="billing", deregister_on_stop=True)
            )
            async with Reading(world, leases=store, settings=settings):
                async with Reading(world, leases=store, settings=settings) as second:
                    await until(lambda: second.states == ["active"], "a shard for the second worker")
                assert "billing" in consumers(world)
            assert consumers(world) == {}

    run(main)


class _HangingStore(MemoryLeaseStore):
    """Does not answer reads of the streams while it hangs; a removal begins with one."""

    hangs = False

    async def read_streams(self):
        if self.hangs:
            await asyncio.sleep(3600)
        return await super().read_streams()


@pytest.mark.parametrize("trouble", ["LimitExceededException", "ResourceInUseException", "no answer", "store"])
def test_a_removal_that_fails_keeps_the_deadline_of_the_stop_and_does_not_delay_the_next_start(trouble):
    async def main():
        async with stream_world() as world:
            store, loop = _HangingStore(), asyncio.get_running_loop()
            fanout = FanOutSettings(consumer_name="billing", deregister_on_stop=True)
            settings = ConsumerSettings(leases=QUICK.leases, fanout=fanout)
            async with Reading(world, leases=store, settings=settings) as reading:
                await until(lambda: reading.states == ["active"], "a subscription")
                fault = world.kinesis.faults.on("DeregisterStreamConsumer")
                if trouble == "store":
                    store.hangs = True
                elif trouble == "no answer":
                    fault.half_open()
                else:
                    fault.error(trouble, "not now")
                begun = loop.time()
                await reading.consumer.stop(deadline=1.0)
                assert loop.time() - begun < 10
            assert "billing" in consumers(world)
            assert [bool(event.error) for event in reading.kinds(ConsumerDeregistered)] == [True]
            fault_free(world)
            store.hangs = False
            begun = loop.time()
            async with Reading(world, leases=store, settings=settings) as again:
                await until(lambda: again.states == ["active"], "a subscription of the next worker")
                assert loop.time() - begun < 10

    run(main)


def test_a_consumer_that_was_there_before_is_not_removed():
    async def main():
        async with stream_world() as world:
            arn = world.call("DescribeStreamSummary")["StreamDescriptionSummary"]["StreamARN"]
            world.kinesis.state.call(
                "RegisterStreamConsumer", {"StreamARN": arn, "ConsumerName": "ops"}, now_ms=now_ms()
            )
            fanout = FanOutSettings(consumer_name="ops", deregister_on_stop=True)
            async with Reading(world, settings=ConsumerSettings(leases=QUICK.leases, fanout=fanout)) as reading:
                world.put(KEYS)
                await reading.has(16)
            assert list(consumers(world)) == ["ops"]

    run(main)


def test_a_given_arn_is_used_without_any_other_call():
    async def main():
        async with stream_world() as world:
            arn = world.call("DescribeStreamSummary")["StreamDescriptionSummary"]["StreamARN"]
            made = world.kinesis.state.call(
                "RegisterStreamConsumer", {"StreamARN": arn, "ConsumerName": "ops"}, now_ms=now_ms()
            )["Consumer"]
            for operation in ("DescribeStreamConsumer", "RegisterStreamConsumer", "GetRecords", "GetShardIterator"):
                world.kinesis.faults.on(operation).error("AccessDeniedException", "not yours")
            fanout = FanOutSettings(consumer_arn=made["ConsumerARN"])
            async with Reading(world, settings=ConsumerSettings(leases=QUICK.leases, fanout=fanout)) as reading:
                world.put(KEYS)
                await reading.has(16)
            reading.check(16)
            assert list(consumers(world)) == ["ops"]

    run(main)


def test_a_consumer_that_is_being_deleted_is_waited_for():
    async def main():
        async with stream_world(state_delay=10.0) as world:
            await asyncio.sleep(12)
            store = MemoryLeaseStore()
            fanout = FanOutSettings(consumer_name="billing", deregister_on_stop=True)
            settings = ConsumerSettings(leases=QUICK.leases, fanout=fanout)
            async with Reading(world, leases=store, settings=settings) as reading:
                await until(lambda: reading.states == ["active"], "the first subscription")
            assert consumers(world)["billing"]["ConsumerStatus"] == "DELETING"
            async with Reading(world, leases=store, settings=settings) as reading:
                await until(lambda: reading.states == ["active"], "the second subscription")

    run(main)


def test_the_limit_of_consumers_names_those_that_exist():
    async def main():
        async with stream_world() as world:
            arn = world.call("DescribeStreamSummary")["StreamDescriptionSummary"]["StreamARN"]
            for number in range(20):
                world.kinesis.state.call(
                    "RegisterStreamConsumer", {"StreamARN": arn, "ConsumerName": f"c{number}"}, now_ms=now_ms()
                )
            with pytest.raises(FanOutError, match=r"already has 20 consumers.*: c0, c1, c10"):
                await Reading(world).consumer.run(lambda record: None)

    run(main)


@pytest.mark.parametrize(
    "stream, settings, words",
    [
        ("orders", {"consumer_name": "no spaces"}, "1 to 128 letters"),
        ("orders", {"consumer_arn": "orders/billing"}, "a consumer's ARN looks like"),
        (
            "orders",
            {"consumer_arn": "arn:aws:kinesis:eu-west-1:123456789012:stream/other/consumer/b:1"},
            "not of stream",
        ),
    ],
)
def test_wrong_settings_are_named(stream, settings, words):
    async def main():
        async with stream_world() as world:
            with pytest.raises(ConfigurationError, match=words):
                world.consumer(stream, read="fanout", settings=ConsumerSettings(fanout=FanOutSettings(**settings)))
            polling = ConsumerSettings(fanout=FanOutSettings(consumer_name="billing"))
            with pytest.raises(ConfigurationError, match="only used with read='fanout'"):
                world.consumer(stream, settings=polling)
            with pytest.raises(ConfigurationError, match="'polling' or 'fanout'"):
                world.consumer(stream, read="push")

    run(main)


# reading


@pytest.mark.parametrize("order", ["shard", "key"])
def test_records_come_in_order_across_renewals_and_resharding(order):
    async def main():
        async with stream_world(shards=2, time_scale=0.02) as world:  # a subscription lasts six seconds
            async with Reading(world, order=order) as reading:
                await write_for(world, 15)
                world.split()
                await write_for(world, 15)
                world.merge()
                await write_for(world, 15)
                await reading.has(world.put_count)
                renewals = [shard.subscription.renewal_count for shard in reading.consumer.status().shards]
            reading.check(world.put_count)
            assert max(renewals) >= 2
            assert not reading.kinds(FanOutFellBack)

    run(main)


def test_idle_renewals_continue_where_the_last_subscription_was():
    async def main():
        async with stream_world(time_scale=0.02) as world:
            async with Reading(world, start="latest", app=None) as reading:
                await asyncio.sleep(30)
                world.put(KEYS)
                await reading.has(16)
            reading.check(16)

    run(main)


def test_an_idle_shard_is_not_behind_however_long_its_subscription_lasts():
    async def main():
        async with stream_world() as world, Reading(world) as reading:
            world.put(KEYS)
            await reading.has(16)
            for _ in range(8):
                await asyncio.sleep(30)
                (shard,) = reading.consumer.status().shards
                assert shard.lag == 0
            assert shard.subscription.seconds > 200

    run(main)


def test_two_applications_side_by_side_each_get_everything():
    async def main():
        async with stream_world(shards=2) as world:
            async with Reading(world, app="billing") as one, Reading(world, app="audit") as other:
                await write_for(world, 10)
                await one.has(world.put_count)
                await other.has(world.put_count)
                assert len(consumers(world)) == 2
            one.check(world.put_count)
            other.check(world.put_count)
            assert not one.kinds(FanOutFellBack)
            assert not other.kinds(FanOutFellBack)

    run(main)


def test_until_a_moment_ends_although_events_do_not_say_when_they_were_made():
    async def main():
        async with stream_world(shards=2) as world:
            world.put(KEYS)
            reading = Reading(world, until=now().replace(microsecond=0))
            await reading.consumer.run(reading.handle)
            reading = Reading(world, app="other", until="tip")
            await reading.consumer.run(reading.handle)
            reading.check(16)

    run(main)


def test_a_paused_consumer_holds_no_subscription_and_continues_where_it_was():
    async def main():
        async with stream_world(shards=2) as world:
            async with Reading(world) as reading:
                world.put(KEYS)
                await reading.has(16)
                reading.consumer.pause()
                await until(lambda: world.kinesis.streams.open_count == 0, "closed subscriptions")
                world.put(KEYS)
                await asyncio.sleep(20)
                assert len(reading.records) == 16
                reading.consumer.resume()
                await reading.has(32)
            reading.check(32)
            assert world.kinesis.streams.open_count == 0

    run(main)


# trouble


def faults(world):
    return world.kinesis.faults.on("SubscribeToShard")


TROUBLES = {
    "connections cut inside a frame": lambda world: faults(world).drop(events=2),
    "connections that break at once": lambda world: faults(world).drop(events=0),
    "half-open connections": lambda world: faults(world).fall_silent(events=1),
    "subscriptions that are accepted and silent": lambda world: faults(world).fall_silent(),
    "no answer": lambda world: faults(world).half_open(),
    "answers that are lost": lambda world: faults(world).lose_response(),
    "a storm of ResourceInUse": lambda world: faults(world).resource_in_use(),
    "throttled subscribes": lambda world: faults(world).error("LimitExceededException", "Rate exceeded"),
    "failures of the service": lambda world: faults(world).fail(),
}


@pytest.mark.parametrize("trouble", TROUBLES)
def test_trouble_loses_nothing_repeats_nothing_and_passes(trouble):
    async def main():
        async with stream_world(shards=2) as world:
            async with Reading(world) as reading:
                await write_for(world, 5)
                TROUBLES[trouble](world).with_probability(0.9)
                world.kinesis.streams.opened[0].close()
                await write_for(world, 100)
                fault_free(world)
                await write_for(world, 70)
                await reading.has(world.put_count)
                await until(lambda: reading.states == ["active", "active"], "subscriptions again", 90)
            reading.check(world.put_count)

    run(main, seconds=900)


def test_a_shard_falls_back_to_polling_says_why_and_returns():
    async def main():
        async with stream_world() as world:
            fault = faults(world).fail()
            async with Reading(world) as reading:
                await write_for(world, 40)
                assert reading.states == ["polled"]
                await reading.has(world.put_count - 32)
                (fell_back,) = reading.kinds(FanOutFellBack)
                assert isinstance(fell_back.reason, reasons.SubscriptionFailing)
                assert "InternalFailure" in str(fell_back)
                world.kinesis.faults.remove(fault)
                await until(lambda: reading.states == ["active"], "the subscription", 90)
                assert len(reading.kinds(FanOutReturned)) == 1
                world.put(KEYS)
                await reading.has(world.put_count)
            reading.check(world.put_count)

    run(main)


BREAKS = {
    "connections cut inside the second frame": lambda world: faults(world).drop(events=1),
    "half-open after the first event": lambda world: faults(world).fall_silent(events=1),
}


@pytest.mark.parametrize("trouble", BREAKS)
def test_subscriptions_that_break_after_their_first_event_are_followed_by_polling(trouble):
    async def main():
        async with stream_world() as world:
            BREAKS[trouble](world)
            async with Reading(world) as reading:
                await write_for(world, 120)
                why = [type(event.reason) for event in reading.kinds(FanOutFellBack)]
                assert reasons.SubscriptionFailing in why
                fault_free(world)
                await reading.has(world.put_count)
                await until(lambda: reading.states == ["active"], "the subscription", 90)
            reading.check(world.put_count)

    run(main)


def test_without_permission_to_poll_a_shard_waits_and_says_so():
    async def main():
        async with stream_world() as world:
            world.kinesis.faults.on("GetRecords").error("AccessDeniedException", "no GetRecords")
            fault = faults(world).resource_in_use()
            async with Reading(world) as reading:
                world.put(KEYS)
                await asyncio.sleep(100)
                (shard,) = reading.consumer.status().shards
                assert isinstance(shard.reason, reasons.PollingDenied)
                assert "no GetRecords" in shard.reason.text
                assert reading.records == []
                world.kinesis.faults.remove(fault)
                await reading.has(16)
            reading.check(16)

    run(main)


def test_a_take_over_by_a_stranger_is_answered_once_the_lease_is_proved():
    async def main():
        async with stream_world() as world:
            async with Reading(world) as reading:
                await write_for(world, 10)
                take_over(world)
                await write_for(world, 20)
                await reading.has(world.put_count)
                await until(lambda: reading.states == ["active"], "the subscription")
            reading.check(world.put_count)

    run(main)


def take_over(world):
    for consumer in consumers(world).values():
        for shard in world.open_shards():
            request = {
                "ConsumerARN": consumer["ConsumerARN"],
                "ShardId": shard["ShardId"],
                "StartingPosition": {"Type": "LATEST"},
            }
            world.kinesis.state.subscribe(request, now_ms=now_ms())


def test_two_fleets_with_one_consumer_name_are_reported_and_lose_nothing():
    async def main():
        async with stream_world() as world:
            settings = ConsumerSettings(leases=QUICK.leases, fanout=FanOutSettings(consumer_name="shared"))
            async with (
                Reading(world, app="one", settings=settings) as one,
                Reading(world, app="two", settings=settings) as two,
            ):
                await write_for(world, 120)
                await one.has(world.put_count)
                await two.has(world.put_count)
            one.check(world.put_count)
            two.check(world.put_count)
            told = [*one.kinds(FanOutFellBack), *two.kinds(FanOutFellBack)]
            assert any(event.reason == reasons.ConsumerNameShared(consumer="shared") for event in told)

    run(main)


def test_a_consumer_that_is_deleted_under_the_fleet_is_registered_again():
    async def main():
        async with stream_world(shards=2) as world:
            async with Reading(world) as reading:
                await write_for(world, 10)
                (consumer,) = consumers(world).values()
                request = {"ConsumerARN": consumer["ConsumerARN"]}
                world.kinesis.state.call("DeregisterStreamConsumer", request, now_ms=now_ms())
                await write_for(world, 30)
                await reading.has(world.put_count)
                await until(lambda: reading.states == ["active", "active"], "subscriptions", 90)
                (again,) = consumers(world).values()
                assert again["ConsumerARN"] != consumer["ConsumerARN"]
            reading.check(world.put_count)

    run(main)


def test_a_given_consumer_that_is_deleted_is_the_reason_and_the_service_is_not_asked_every_second():
    async def main():
        async with stream_world() as world:
            arn = world.call("DescribeStreamSummary")["StreamDescriptionSummary"]["StreamARN"]
            request = {"StreamARN": arn, "ConsumerName": "ops"}
            made = world.kinesis.state.call("RegisterStreamConsumer", request, now_ms=now_ms())["Consumer"]
            fanout = FanOutSettings(consumer_arn=made["ConsumerARN"])
            async with Reading(world, settings=ConsumerSettings(leases=QUICK.leases, fanout=fanout)) as reading:
                await write_for(world, 10)
                request = {"ConsumerARN": made["ConsumerARN"]}
                world.kinesis.state.call("DeregisterStreamConsumer", request, now_ms=now_ms())
                refused = len(refusals(world))
                await write_for(world, 120)
                assert 3 <= len(refusals(world)) - refused <= 8
                await reading.has(world.put_count)
                (shard,) = reading.consumer.status().shards
                assert isinstance(shard.subscription.reason, reasons.ConsumerMissing)
            reading.check(world.put_count)
            assert consumers(world) == {}

    run(main)


@pytest.mark.parametrize("code", ["KMSThrottlingException", "InternalFailureException"])
def test_an_error_in_the_stream_is_backed_off_from(code):
    async def main():
        async with stream_world() as world:
            async with Reading(world) as reading:
                await write_for(world, 5)
                end_subscriptions(world, code)
                await write_for(world, 20)
                await reading.has(world.put_count)
            reading.check(world.put_count)
            assert any(code in event.error for event in reading.events if hasattr(event, "error"))

    run(main)


def end_subscriptions(world, code, message="a fault of the key"):
    from anabranch.local.errors import LocalError

    for (_, shard_id), subscription in world.kinesis.state.account.subscriptions.items():
        subscription.end(LocalError(code, message))
        world.kinesis.state.on_change(world.stream, shard_id)


def test_a_key_that_cannot_be_used_is_the_reason_and_it_is_not_polled_around():
    async def main():
        async with stream_world() as world:
            faults(world).error("KMSDisabledException", "the key is disabled")
            async with Reading(world) as reading:
                world.put(KEYS)
                await asyncio.sleep(30)
                (shard,) = reading.consumer.status().shards
                assert isinstance(shard.reason, reasons.StreamKeyDenied)
                assert "the key is disabled" in shard.reason.text
                fault_free(world)
                await reading.has(16)
            reading.check(16)

    run(main)


def test_the_last_event_of_a_shard_names_its_children_and_they_follow():
    async def main():
        async with stream_world() as world:
            async with Reading(world) as reading:
                world.put(KEYS)
                await reading.has(16)
                world.split()
                world.put(KEYS)
                await reading.has(32, seconds=5)  # sooner than a listing would find them
            reading.check(32)

    run(main)


def test_a_restart_loses_nothing_and_repeats_nothing():
    async def main():
        async with stream_world(shards=2) as world:
            store, records = MemoryLeaseStore(), []
            for _ in range(4):
                async with Reading(world, leases=store) as reading:
                    await write_for(world, 7)
                    await until(lambda: reading.records, "records")
                records += reading.records
                world.put(KEYS)
            async with Reading(world, leases=store) as reading:
                await until(lambda: len(records) + len(reading.records) >= world.put_count, "the rest")
            reading.records = [*records, *reading.records]
            reading.check(world.put_count)

    run(main)


def test_records_that_were_trimmed_in_the_second_of_a_subscription_are_reported(monkeypatch):
    """The service says the time to the second, and when a record arrived to the millisecond."""
    epoch_ms, leap_ms = simulated_stream._EPOCH_MS, 24 * 3_600_000 + 300
    monkeypatch.setattr(simulated_stream._LoopClock, "wall_ms", lambda clock: epoch_ms + clock.now_ms())

    async def main():
        async with stream_world() as world:
            async with Reading(world) as reading:
                await until(lambda: reading.states == ["active"], "the subscription")
                await asyncio.sleep(2.2 - now_ms() % 1000 / 1000)
                world.put(["a"])
                await reading.has(1)
                reading.consumer.pause()
                await asyncio.sleep(0.3)
                world.put(["a"])
                monkeypatch.setattr(simulated_stream, "_EPOCH_MS", epoch_ms + leap_ms)
                reading.consumer.resume()
                await asyncio.sleep(0.1)
                world.put(["a"])
                await reading.has(2)
            assert numbers(reading.records) == [0, 2]
            assert len(reading.kinds(DataLost)) == 1

    run(main)


# memory


def replace_leases(**changes):
    return LeaseSettings(expiry=3.0, stall_limit=60.0, **changes)


def test_a_full_budget_for_long_unsubscribes_and_subscribes_again_with_room():
    async def main():
        async with stream_world(shards=2) as world:
            budget, gate, held = Budget(24 << 20), asyncio.Event(), []
            settings = ConsumerSettings(budget=budget, leases=replace_leases(drain_deadline=60.0))

            async def wait(record):
                held.append(record)
                await gate.wait()

            reading = Reading(world, settings=settings)
            reading.handle = wait
            async with reading:
                for n in range(80):
                    world.call("PutRecord", PartitionKey="k", ExplicitHashKey=str((n % 2) << 127), Data=bytes(900_000))
                await until(lambda: "full" in reading.states, "an unsubscribed shard", 60)
                assert budget.peak_bytes <= budget.limit_bytes
                await asyncio.sleep(100)
                gate.set()
                await until(lambda: len(held) == 80, "all records")
            assert budget.peak_bytes <= budget.limit_bytes
            assert budget.used_bytes == 0

    run(main)


def test_a_flood_after_silence_stays_within_the_budget():
    """200 shards that were quiet, and 1 MiB for each of them at once."""

    async def main():
        async with stream_world(shards=200) as world:
            budget = Budget(64 << 20)
            settings = ConsumerSettings(budget=budget, leases=QUICK.leases)
            async with Reading(world, settings=settings) as reading:
                await until(lambda: reading.states == ["active"] * 200, "200 subscriptions")
                await asyncio.sleep(30)
                data = bytes(1_000_000)
                for number in range(200):
                    hash_key = str(number * ((1 << 128) // 200))
                    world.call("PutRecord", PartitionKey=f"k{number}", ExplicitHashKey=hash_key, Data=data)
                await reading.has(200)
            assert len({record.sequence_number for record in reading.records}) == 200
            assert 32 << 20 < budget.peak_bytes <= budget.limit_bytes
            assert budget.used_bytes == 0

    run(main)


def test_a_handled_event_is_not_kept_while_the_next_one_is_awaited():
    async def main():
        async with stream_world() as world, Reading(world) as reading:
            for _ in range(3):
                world.call("PutRecord", PartitionKey="k", Data=bytes(900_000))
            await reading.has(3)
            await asyncio.sleep(1)  # the next, empty event comes after five seconds
            held = [record.data for record in reading.records]
            reading.records.clear()
            assert [sys.getrefcount(data) for data in held] == [3, 3, 3]  # `held`, `data` and the argument

    run(main)


def test_the_status_says_since_when_how_often_renewed_and_when_the_last_event_came():
    async def main():
        async with stream_world(time_scale=0.02) as world:
            async with Reading(world) as reading:
                await asyncio.sleep(15)
                (shard,) = reading.consumer.status().shards
                found = shard.subscription
                assert found.state == "active"
                assert found.renewal_count == 2
                assert 0 <= found.seconds <= 6.5
                assert 0 <= found.event_seconds_ago <= 0.2
                assert found == replace_struct(found, reason=None)
            assert not reading.kinds(SubscriptionEnded)

    run(main)
