"""Handlers that do not wait: called one after another in one step, each only while the lease is surely ours."""

import asyncio
import random
from types import SimpleNamespace

import pytest

from anabranch._core.handling.lanes import Lane
from anabranch._core.leases.lease_table import Holding
from anabranch._core.reading.horizon import Horizon
from anabranch._core.reading.pace import Pace, PaceLimits
from anabranch._core.reading.unpacking import Unpacker
from anabranch._engine.clock import Scheduler, SystemClock
from anabranch._engine.handler_calls import HandlerCall, HandlerOptions
from anabranch._engine.ports import Ports
from anabranch._engine.runners import SLICE, RecordRunners
from anabranch._engine.session import Session
from anabranch._model.leases import LeaseKey, LeaseRow
from anabranch._model.sequence_numbers import Position
from anabranch._model.streams import StreamName
from anabranch.budget import READ_RESERVE_BYTES, Budget
from anabranch.policies import Retry
from shard_records import SHARD, STREAM, plain

ORDERS = pytest.mark.parametrize("order", ["shard", "key", "none"])


class Works:
    """Runners, one session that was read, and what its handler was called with."""

    def __init__(self, handler, order="shard", *, count=10, keys="abc", concurrency=3, policy=None, bare=None):
        self.handled = []
        self.failed = []
        self.may_start = True
        self.turns = 0
        clock = SystemClock()
        ports = Ports(kinesis=None, store=None, clock=clock, entropy=random.Random(1), emit=lambda _: None)
        member = SimpleNamespace(may_start=lambda *_: self.may_start)
        self._handler = handler
        self._count, self._keys, self._concurrency = count, keys, concurrency
        self.runners = RecordRunners(
            ports,
            member,
            Scheduler(clock, lambda error: None),
            HandlerCall(bare or self._handle, threads=1),
            HandlerOptions(order=order, concurrency=concurrency, decode=None, policy=policy or Retry()),
            on_finished=lambda _: None,
            on_failed=lambda _, record, reason, error: self.failed.append((int(record.sequence_number), reason)),
            on_undecodable=lambda _, error: self.failed.append((int(error.record.sequence_number), str(error.cause))),
        )
        row = LeaseRow(key=LeaseKey("1:orders:1", 0, SHARD))
        unpacker = Unpacker(STREAM, SHARD, None)
        self.session = Session(
            Holding(row), StreamName(STREAM), unpacker, Pace(PaceLimits(), 0), Budget(), Horizon(24, 0.0)
        )
        self.session.lane = Lane(row.checkpoint, order, self.session.window)

    async def _handle(self, record):
        await self._handler(self, record)
        self.handled.append(int(record.sequence_number))

    async def run(self, step_count=50):
        """Reads everything, then lets the loop turn so often."""
        keys = self._keys
        assert self.session.budget.try_reserve(READ_RESERVE_BYTES)
        records = [plain(number, keys[number % len(keys)]) for number in range(1, self._count + 1)]
        self.session.accept(records, READ_RESERVE_BYTES)
        tasks = [asyncio.create_task(self.runners.run_one()) for _ in range(self._concurrency)]
        await asyncio.sleep(0)
        self.runners.shelf.offer(self.session)
        for _ in range(step_count):
            await asyncio.sleep(0)
            self.turns += 1
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    @property
    def watermark(self):
        return self.session.lane.checkpoint().watermark


async def at_once(works, record):
    """Does not wait."""


@ORDERS
def test_handlers_that_do_not_wait_are_called_in_stream_order(order):
    works = Works(at_once, order)
    asyncio.run(works.run())
    assert works.handled == list(range(1, 11))
    assert works.watermark == Position(10)
    assert works.runners.running() == []
    assert works.session.budget.used_bytes == 0


@ORDERS
def test_a_handler_that_waits_now_and_then_is_called_once_for_each_record(order):
    async def handler(works, record):
        if int(record.sequence_number) % 3 == 0:
            await asyncio.sleep(0)

    works = Works(handler, order, count=40)
    asyncio.run(works.run(200))
    assert sorted(works.handled) == list(range(1, 41))
    assert works.watermark == Position(40)
    if order == "shard":
        assert works.handled == sorted(works.handled)
    if order == "key":
        for first in range(3):
            of_key = [number for number in works.handled if number % 3 == first]
            assert of_key == sorted(of_key)


@ORDERS
def test_the_fence_is_compared_before_each_call_also_where_none_of_them_waits(order):
    async def handler(works, record):
        if record.sequence_number == "4":
            works.may_start = False

    works = Works(handler, order)
    asyncio.run(works.run())
    assert works.handled == [1, 2, 3, 4]
    assert works.watermark == Position(4)


def test_a_handler_that_stops_its_consumer_is_not_called_again():
    async def handler(works, record):
        works.session.drains = record.sequence_number == "4"

    works = Works(handler)
    asyncio.run(works.run())
    assert works.handled == [1, 2, 3, 4]


def test_a_handler_that_does_not_wait_still_lets_the_loop_turn():
    seen = []

    async def handler(works, record):
        seen.append(works.turns)

    works = Works(handler, count=3 * SLICE, concurrency=1)
    asyncio.run(works.run())
    assert len(works.handled) == 3 * SLICE
    assert len(set(seen)) == 3


@ORDERS
def test_a_call_that_fails_without_waiting_is_tried_again_and_finishes_nothing_after_it_before(order):
    tries = []

    async def handler(works, record):
        if record.sequence_number == "3":
            tries.append(works.handled.copy())
            if len(tries) == 1:
                raise ValueError("not yet")

    works = Works(handler, order, policy=Retry(attempts=2, backoff=0.0))
    asyncio.run(works.run())
    assert sorted(works.handled) == list(range(1, 11)), tries
    assert tries[0] == [1, 2]
    assert works.failed == []


def test_a_call_that_fails_to_the_last_attempt_stops_its_shard_there():
    async def handler(works, record):
        if record.sequence_number == "3":
            raise ValueError("never")

    works = Works(handler, policy=Retry(attempts=1))
    asyncio.run(works.run())
    assert works.handled == [1, 2]
    assert works.watermark == Position(2)
    assert works.failed == [(3, "its handler failed 1 times, the last time with ValueError: never")]


@pytest.mark.parametrize("count", [3, 10])  # the last of the stretch, and one in the middle
def test_a_call_that_cancels_its_own_task_and_does_not_wait_disturbs_no_other(count):
    async def handler(works, record):
        if record.sequence_number == "3":
            asyncio.current_task().cancel()
        elif record.sequence_number == "4":
            await asyncio.sleep(0)

    works = Works(handler, count=count, concurrency=1, policy=Retry(attempts=1))
    asyncio.run(works.run())
    assert works.handled == list(range(1, count + 1))
    assert works.failed == []


def test_what_runs_can_be_seen_while_a_call_does_not_wait():
    seen = []

    async def handler(works, record):
        seen.append([record.sequence_number for _, record in works.runners.running()])

    works = Works(handler, count=3)
    asyncio.run(works.run())
    assert seen == [["1"], ["2"], ["3"]]


def test_a_handler_that_returns_work_undone_fails_its_record():
    async def undone():
        """Never awaited."""

    async def handler(record):
        return undone()

    works = Works(at_once, policy=Retry(attempts=1), count=1, bare=handler)
    asyncio.run(works.run())
    assert works.watermark is None
    ((number, reason),) = works.failed
    assert number == 1
    assert "nothing was handled" in reason
