"""After an unexpected error at any step of the writer, every record still gets a true outcome, and no caller hangs.

Every function of the producer's core and engine fails in turn, before and after its work, in a run with throttling,
failures, a full buffer and resharding. The simulated loop raises `Deadlock` if a caller waits forever.
"""

import asyncio
import contextlib
import functools
import importlib
import inspect
import pkgutil
import types
from collections import Counter

import pytest
from memory_kinesis import MemoryKinesis

import anabranch._core.writing
import anabranch._engine.writing
from anabranch._wire.messages import PutRecordsResponse, PutRecordsResultEntry
from anabranch.config import ProducerSettings
from anabranch.errors import AccessDeniedError, DeliveryFailed, InvalidRequestError, ProducerError, TransportError
from anabranch.events import WriterFailed
from anabranch.testing.loop import run

THROTTLED = PutRecordsResultEntry(None, None, "ProvisionedThroughputExceededException", "slow down")

# Not steps of the writer: the thread of the blocking producer, and the handle that users hold.
OTHER_MODULES = {"anabranch._engine.writing.write_thread"}
OF_THE_HANDLE = ("Delivery.", "_wake", "_resolve")
# What runs when the writer ends, as a last resort.
LAST_RESORT = "Writer._abandon"
# Before there is a record.
FIRST = "Writer.start"


class Fault(Exception):  # noqa: N818 -- its name
    pass


class Faults:
    """Counts the calls of each function, and lets one of them fail."""

    def __init__(self, patch, *, name=None, number=0, after=False):
        self.calls = Counter()
        self.is_raised = False
        self._target = (name, number, after)
        self._is_armed = True
        wrapped = {}
        modules = [
            importlib.import_module(found.name)
            for package in (anabranch._core.writing, anabranch._engine.writing)
            for found in pkgutil.iter_modules(package.__path__, f"{package.__name__}.")
            if found.name not in OTHER_MODULES
        ]
        for module in modules:
            for function in vars(module).values():
                if isinstance(function, types.FunctionType) and function.__module__ == module.__name__:
                    wrapped[function] = self._wrap(function)
            for owner in vars(module).values():
                if inspect.isclass(owner) and owner.__module__ == module.__name__:
                    self._wrap_methods(patch, owner)
        for module in modules:
            for attribute, function in list(vars(module).items()):
                if isinstance(function, types.FunctionType) and function in wrapped:
                    patch.setattr(module, attribute, wrapped[function])

    def _wrap_methods(self, patch, owner):
        for name, member in list(vars(owner).items()):
            if isinstance(member, types.FunctionType) and not name.startswith("__"):
                patch.setattr(owner, name, self._wrap(member))
            elif isinstance(member, staticmethod):
                patch.setattr(owner, name, staticmethod(self._wrap(member.__func__)))
            elif isinstance(member, property):
                patch.setattr(owner, name, property(self._wrap(member.fget)))

    def _wrap(self, function):
        name = function.__qualname__
        if inspect.iscoroutinefunction(function) or inspect.isgeneratorfunction(function):
            return function
        if name == FIRST or name.startswith(OF_THE_HANDLE):
            return function

        @functools.wraps(function)
        def call(*arguments, **options):
            if name == LAST_RESORT:
                self._is_armed = False
            if not self._is_armed:
                return function(*arguments, **options)
            self.calls[name] += 1
            is_due = self._target[:2] == (name, self.calls[name])
            if is_due and not self._target[2]:
                self._fail()
            result = function(*arguments, **options)
            if is_due:
                self._fail()
            return result

        return call

    def _fail(self):
        self._is_armed = False
        self.is_raised = True
        raise Fault("a bug of ours")


class Story:
    """One run of a producer in which everything goes wrong that can."""

    def __init__(self, aggregate):
        self.kinesis = MemoryKinesis({"orders": 2, "other": 1, "secret": 1}, latency=0.02)
        self.aggregate = aggregate
        self.events = []
        self.deliveries = []
        self.results = []
        self.close_error = None

    async def __call__(self):
        kinesis = self.kinesis
        plain, kinesis.put_records = kinesis.put_records, self._put_records
        self._plain_put = plain
        self._call_count = 0
        producer = kinesis.producer(
            aggregate=self.aggregate,
            buffer_bytes=1 << 20,
            delivery_timeout=20.0,
            linger=0.03,
            settings=ProducerSettings(requests_in_flight=2),
            on_event=self.events.append,
        )
        async with asyncio.TaskGroup() as tasks:
            for chapter in (self._write, self._write_large, self._reshard, self._flush):
                tasks.create_task(self._survive(chapter(producer)))
        try:
            await producer.close(deadline=30.0)
        except (ProducerError, Fault) as error:
            self.close_error = error
        for delivery in self.deliveries:
            self.results.append(await self._result(delivery))

    async def _survive(self, chapter):
        with contextlib.suppress(ProducerError, Fault):
            await chapter

    async def _result(self, delivery):
        async with asyncio.timeout(300):
            with contextlib.suppress(Fault):
                return await delivery
            return await delivery

    async def _write(self, producer):
        for number in range(12):
            await self._survive(self._put(producer, b"a%d" % number, f"k{number % 4}"))
            await asyncio.sleep(0.01)
        await self._survive(self._put(producer, b"denied", "denied", stream="secret"))
        await self._survive(self._put(producer, b"hashed", "h", explicit_hash_key="7"))
        await self._survive(self._put(producer, b"elsewhere", "k1", stream="other"))
        for number in range(12, 40):
            with contextlib.suppress(ProducerError, Fault):
                self.deliveries.append(producer.put_nowait(b"a%d" % number, f"k{number % 4}"))
        self.deliveries += await producer.put_many([(f"k{n % 4}", b"a%d" % n) for n in range(40, 60)])
        await self._result(self.deliveries[-1])
        await self._survive(self._put(producer, b"later", "denied", stream="secret"))
        for data in (b"fine", b"poison", b"well"):
            await self._survive(self._put(producer, data, "p" + data.decode(), stream="other"))

    async def _write_large(self, producer):
        for number in range(4):
            await self._survive(self._put(producer, b"b%d" % number * 200_000, f"large{number % 2}"))

    async def _put(self, producer, data, key, **options):
        delivery = await producer.put(data, key, **options)
        self.deliveries.append(delivery)

    async def _reshard(self, producer):
        await asyncio.sleep(0.1)
        self.kinesis.split()
        await asyncio.sleep(0.1)
        self.kinesis.merge()

    async def _flush(self, producer):
        await asyncio.sleep(0.06)
        with contextlib.suppress(DeliveryFailed):
            await producer.flush()

    async def _put_records(self, stream, entries):
        self._call_count += 1
        if stream.name == "secret":
            raise AccessDeniedError("no", operation="PutRecords", code="AccessDeniedException")
        if any(b"poison" in entry.data for entry in entries):
            raise InvalidRequestError("bad", operation="PutRecords", code="ValidationException")
        if self._call_count in {3, 9}:
            await self._plain_put(stream, entries)
            raise TransportError("the connection was lost")
        if self._call_count in {5, 11}:
            rest = await self._plain_put(stream, entries[1:]) if entries[1:] else PutRecordsResponse([], "r")
            return PutRecordsResponse([THROTTLED, *rest.entries], "r")
        return await self._plain_put(stream, entries)

    def check(self, faults):
        stored = Counter(self.kinesis.records()) + Counter(self.kinesis.records("other"))
        assert len(self.results) == len(self.deliveries)
        for result in self.results:
            copies = stored[result.partition_key, result.data]
            if result.delivered:
                assert copies, f"reported as delivered, but not in the stream: {result}"
            elif not result.maybe_written:
                assert not copies, f"reported as not written, but in the stream: {result}"
        has_failed = any(isinstance(event, WriterFailed) for event in self.events)
        if has_failed:
            assert faults.is_raised
            assert self.close_error is not None, "close() reports success after the producer failed"
        elif not isinstance(self.close_error, Fault):
            failed = [result.data for result in self.results if not result.delivered]
            assert set(failed) <= {b"denied", b"later", b"poison"}, "the writer continues"


def tell(patch, aggregate, **fault):
    """Runs the story with one fault. Returns the calls, and whether the fault ended the writer."""
    with patch.context() as inner:
        faults = Faults(inner, **fault)
        story = Story(aggregate)
        run(story)
    story.check(faults)
    return faults, story


AGGREGATES = ["shard", "key", None]


@pytest.mark.parametrize("aggregate", AGGREGATES)
def test_without_a_fault_all_is_delivered_that_the_service_takes(aggregate, monkeypatch):
    faults, story = tell(monkeypatch, aggregate)
    assert [result.data for result in story.results if not result.delivered] == [b"denied", b"later", b"poison"]
    assert len(story.results) == 71
    assert len(faults.calls) > 60, "the story reaches most of the writer"


def faults_of(calls, numbers):
    for name in sorted(calls):
        for number in sorted(set(numbers(calls[name]))):
            for after in (False, True):
                yield {"name": name, "number": number, "after": after}


def check_all(patch, aggregate, numbers):
    calls = tell(patch, aggregate)[0].calls
    failed_count = 0
    for fault in faults_of(calls, numbers):
        try:
            faults, story = tell(patch, aggregate, **fault)
        except BaseException as error:
            error.add_note(f"tell(patch, {aggregate!r}, **{fault})")
            raise
        assert faults.is_raised or fault["after"], fault  # a function that raises by itself has no end
        failed_count += any(isinstance(event, WriterFailed) for event in story.events)
    assert failed_count > 50


@pytest.mark.parametrize("aggregate", ["shard", None])
def test_whatever_step_of_the_writer_fails_each_record_gets_a_true_outcome(aggregate, monkeypatch):
    check_all(monkeypatch, aggregate, lambda count: [count // 2 + 1])


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("aggregate", AGGREGATES)
def test_whichever_call_of_any_step_fails_each_record_gets_a_true_outcome(aggregate, monkeypatch):
    check_all(monkeypatch, aggregate, lambda count: [1, count // 3 + 1, 2 * count // 3 + 1, count])
