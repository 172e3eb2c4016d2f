"""The registered consumer of each stream: found or registered when a worker joins, removed by the last one to stop.

`_core.reading.registration` decides each step (rule F5), and this module performs it. A worker writes its member row
before it reads the registration, so a worker that removes the consumer sees it.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

from msgspec.structs import replace

from anabranch._core.leases.store_calls import NoAnswer, PollStore, ReadStreams, StoreCall, WriteStream
from anabranch._core.reading.registration import LOOK_EVERY_MS, Found, may_remove, next_step, own_name
from anabranch._engine.fleet import Fleet
from anabranch._engine.shard_discovery import CoalescedCall, retry_kinesis_call
from anabranch._model.leases import FanOutConsumer, StreamRow
from anabranch._ports import Ports
from anabranch._wire.messages import ConsumerDescription
from anabranch.errors import (
    AnabranchError,
    FanOutError,
    LeaseStoreError,
    ResourceInUseError,
    StreamNotFoundError,
    ThrottledError,
    TransportError,
)
from anabranch.events import ConsumerDeregistered, ConsumerRegistered
from anabranch.limits import CONSUMERS_PER_STREAM_MAX

T = TypeVar("T")

REMOVAL_MS_MIN = 5_000
"""How long a removal may take if the deadline of the stop is nearer."""
STORE_RETRY_MS = 500
STORE_TRIES_MAX = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class FanOutPlan:
    app: str | None
    """None: a consumer for this run alone."""
    name: str | None = None
    arn: str | None = None
    removes: bool = False
    """Whether the last worker to stop removes what the application registered."""
    is_temporary: bool = False
    """No later run can use the consumer, so a run that fails removes it, too."""


@dataclass(eq=False, repr=False)
class FanOutRegistration:
    _ports: Ports
    _fleet: Fleet
    _plan: FanOutPlan
    _start_timeout_ms: int
    _consumers: dict[str, FanOutConsumer] = field(default_factory=dict)
    _checks: dict[str, CoalescedCall] = field(default_factory=dict)

    def of(self, stream_key: str) -> FanOutConsumer:
        return self._consumers[stream_key]

    async def start(self, stream_keys: Iterable[str]) -> None:
        """Call after this worker has joined. Raises if fan-out cannot be used."""
        for stream_key in stream_keys:
            self._checks[stream_key] = CoalescedCall(partial(self._ensure, stream_key, look=True))
            await self._ensure(stream_key)

    async def check(self, stream_key: str) -> None:
        """The service does not know the consumer: registers it again if it is gone. Raises if that fails."""
        await self._checks[stream_key].wait()

    async def _ensure(self, stream_key: str, *, look: bool = False) -> None:
        if self._plan.arn is not None:
            name = self._plan.arn.rpartition("/")[2].partition(":")[0]
            self._consumers[stream_key] = FanOutConsumer(name=name, arn=self._plan.arn, state="found")
            return
        clock, name = self._ports.clock, self._plan.name or own_name(self._plan.app, self._fleet.app.app_id)
        begun_ms = clock.now_ms()
        found: Found = "unknown"
        while True:
            waited_ms = clock.now_ms() - begun_ms
            row = await self._read_row(stream_key)
            if look:
                found, look = await self._look(row, name), False
            step = next_step(name, row.fanout, found, waited_ms=waited_ms, is_own=self._plan.name is None)
            if step == "ready":
                assert row.fanout is not None, "the stored consumer is ready"
                consumer = replace(row.fanout, state="registered")
                if self._consumers.get(stream_key) != consumer:
                    self._consumers[stream_key] = consumer
                    self._ports.emit(ConsumerRegistered(stream=row.name, consumer=name, arn=consumer.arn))
                return
            if isinstance(step, FanOutConsumer):
                await self._store(row, step)
                found = "unknown"
                continue
            if step == "look_again":
                if waited_ms >= self._start_timeout_ms:
                    status = found if isinstance(found, str) else found.status
                    raise TransportError(
                        f"consumer {name} of stream {row.name} is still {status} after "
                        f"{self._start_timeout_ms / 1000:.0f} s (start_timeout)"
                    )
                await clock.sleep_until_ms(clock.now_ms() + LOOK_EVERY_MS)
            elif step == "register":
                await self._register(row, name)
            found = await self._look(row, name)

    # the service

    async def _kinesis(self, call: Callable[[], Awaitable[T]]) -> T:
        return await retry_kinesis_call(self._ports, call, retry_answered_ms=self._start_timeout_ms)

    async def _look(self, row: StreamRow, name: str) -> Found:
        describe = partial(self._ports.kinesis.describe_stream_consumer, row.arn, name)
        try:
            return await self._kinesis(describe)
        except StreamNotFoundError:
            return "missing"

    async def _register(self, row: StreamRow, name: str) -> None:
        """If it already exists, another worker was faster, or the response to our call was lost."""
        kinesis, refusal_count = self._ports.kinesis, 0

        async def register() -> None:
            nonlocal refusal_count
            try:
                await kinesis.register_stream_consumer(row.arn, name)
            except ResourceInUseError:
                return
            except ThrottledError as error:
                if error.code != "LimitExceededException":
                    raise
                others = sorted(other.name for other in await list_consumers(self._ports, row.arn))
                # The first refusal may be about calls per second, in an account with a higher limit of consumers.
                refusal_count += 1
                if len(others) >= CONSUMERS_PER_STREAM_MAX and refusal_count > 1:
                    raise FanOutError(
                        f"cannot register consumer {name}: stream {row.name} already has {len(others)} consumers, "
                        f"which is the limit: {', '.join(others)}. Remove one that nobody "
                        f"uses (`anabranch streams consumers rm {row.name} NAME`), or read by polling"
                    ) from error
                raise

        await self._kinesis(register)

    # the row

    async def _read_row(self, stream_key: str) -> StreamRow:
        rows = await self._ask(ReadStreams())
        row = next((row for row in rows if row.stream_key == stream_key), None)
        return row if row is not None else self._fleet.raise_store_reset()

    async def _store(self, row: StreamRow, fanout: FanOutConsumer | None) -> StreamRow | None:
        """None if the row has changed: the caller reads it again."""
        return await self._ask(WriteStream(replace(row, fanout=fanout), row.version))

    async def _ask(self, call: StoreCall[T]) -> T:
        """Repeats the call until it has an answer. A repeated write may fail its condition: the caller reads again."""
        clock, tries = self._ports.clock, 0
        while True:
            answer = await self._fleet.ask(call)
            if not isinstance(answer, NoAnswer):
                return answer
            tries += 1
            if tries == STORE_TRIES_MAX:
                raise LeaseStoreError(f"{answer.error}, {tries} times in a row", code=answer.code)
            await clock.sleep_until_ms(clock.now_ms() + STORE_RETRY_MS)

    # the end

    async def remove(self, deadline_ms: int) -> None:
        """Removes what the application registered, if no other worker is alive. Call after this worker has left."""
        if not self._plan.removes or self._plan.arn is not None:
            return
        seconds = max(deadline_ms - self._ports.clock.now_ms(), REMOVAL_MS_MIN) / 1000
        async with asyncio.TaskGroup() as group:
            for stream_key, consumer in self._consumers.items():
                group.create_task(self._try_to_remove(stream_key, consumer, seconds), name=f"removal {consumer.name}")

    async def abandon(self) -> None:
        """The run failed. Removes a consumer that only this run could use; others are left to the next worker."""
        if self._plan.is_temporary:
            await self.remove(self._ports.clock.now_ms())

    async def _try_to_remove(self, stream_key: str, consumer: FanOutConsumer, seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds):
                await self._remove(stream_key, consumer)
        except (AnabranchError, TimeoutError) as error:
            text = str(error) or f"it did not succeed within {seconds:.0f} s"
            stream = stream_key.split(":")[1]
            self._ports.emit(ConsumerDeregistered(stream=stream, consumer=consumer.name, error=text))

    async def _remove(self, stream_key: str, consumer: FanOutConsumer) -> None:
        """Announces the removal before it looks for other workers: one that joins meanwhile waits (rule F5)."""
        row = await self._read_row(stream_key)
        if not may_remove(row.fanout, consumer.name) or await self._others_are_live():
            return
        removing = replace(consumer, state="removing")
        announced = await self._store(row, removing)
        if announced is None:
            return  # another worker changed it: it is not the last one
        try:
            if await self._others_are_live():
                await self._store(announced, consumer)
                return
            with suppress(StreamNotFoundError):  # somebody else removed it, or the stream is gone
                await self._kinesis(partial(self._ports.kinesis.deregister_stream_consumer, consumer.arn))
            await self._store(announced, None)
        except BaseException:
            # While the row says `removing`, a worker that joins would wait. Tried only once, because time may be up. If
            # the service has removed the consumer, the next worker registers it again.
            await self._fleet.store.call(WriteStream(replace(announced, fanout=consumer), announced.version))
            raise
        self._ports.emit(ConsumerDeregistered(stream=row.name, consumer=consumer.name))

    async def _others_are_live(self) -> bool:
        poll = await self._ask(PollStore())
        mine = self._fleet.member_id
        return any(member.state == "live" and member.member_id != mine for member in poll.members)


async def list_consumers(ports: Ports, stream_arn: str) -> list[ConsumerDescription]:
    found: list[ConsumerDescription] = []
    token: str | None = None
    while True:
        page = await ports.kinesis.list_stream_consumers(stream_arn, next_token=token)
        found += page.consumers
        token = page.next_token
        if token is None:
            return found
