"""Performs the steps that the lease core decides: each store call with a deadline, each wait on the clock.

It knows no lease rule. A call without an answer is handed back as `NoAnswer`.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from anabranch._core.leases.store_calls import (
    Action,
    Answer,
    CreateLease,
    DeleteLease,
    DeleteMember,
    Leave,
    Moment,
    NoAnswer,
    OpenApp,
    PollStore,
    PutStream,
    ReadApp,
    ReadIncarnation,
    ReadLease,
    ReadLeases,
    ReadStreams,
    RecordIncarnation,
    RegisterMember,
    RequestHandOff,
    Seal,
    SendHeartbeat,
    Steps,
    StoreCall,
    TakeLease,
    WriteControl,
    WriteLease,
    WriteStatus,
    WriteStream,
)
from anabranch._ports import Clock, LeaseStore
from anabranch.errors import LeaseStoreCode, LeaseStoreError
from anabranch.measures import TimeBuckets

T = TypeVar("T")


def moment_of(clock: Clock) -> Moment:
    return Moment(clock.now_ms(), clock.wall_ms())


async def drive(
    steps: Steps[T], perform: Callable[[Action], Awaitable[Any]], clock: Clock, after_step: Callable[[], None]
) -> T:
    """Performs the steps one after another. `after_step` is called each time before one is performed, and at the
    end.
    """
    try:
        action = next(steps)
        while True:
            after_step()
            answer = await perform(action)
            action = steps.send(Answer(answer, moment_of(clock)))
    except StopIteration as done:
        result: T = done.value
        return result
    finally:
        steps.close()  # if it was cancelled during a call, there is no answer to send
        after_step()


class StoreCaller:
    """Calls a lease store, each time with a deadline, and counts the calls. Used on one event loop."""

    def __init__(self, store: LeaseStore, clock: Clock) -> None:
        self._store = store
        self._clock = clock
        self.calls = TimeBuckets()
        self.failure_count = 0
        self.throttle_count = 0

    async def call(self, call: StoreCall[Any], deadline_ms: int) -> object:
        """What the store returned, or `NoAnswer`. Raises errors that no retry fixes (no database, another schema)."""
        deadline_ms, began_ms = call.deadline_ms or deadline_ms, self._clock.now_ms()
        try:
            async with asyncio.timeout(deadline_ms / 1000):
                return await send(self._store, call)
        except LeaseStoreError as error:
            return self._no_answer(str(error), error.code)
        except TimeoutError:
            return self._no_answer(f"lease store {self._store} gave no answer within {deadline_ms} ms")
        finally:
            self.calls.add(self._clock.now_ms() - began_ms)

    def _no_answer(self, error: str, code: LeaseStoreCode = "no_answer") -> NoAnswer:
        self.failure_count += 1
        self.throttle_count += code == "throttled"
        return NoAnswer(error, code)


def send(store: LeaseStore, call: StoreCall[Any]) -> Awaitable[object]:
    match call:
        case OpenApp():
            return store.open(call.app)
        case ReadApp():
            return store.read_app()
        case ReadIncarnation():
            return store.identity()
        case RecordIncarnation():
            return store.record_incarnation(call.expected, call.incarnation)
        case RegisterMember():
            return store.register_member(call.row)
        case SendHeartbeat():
            return store.heartbeat(call.write)
        case PollStore():
            return store.poll()
        case Seal():
            return store.seal_member(call.member_id, call.observed_counter)
        case Leave():
            return store.leave(call.member_id)
        case RequestHandOff():
            return store.request_hand_off(call.donor, call.request.short_name)
        case DeleteMember():
            return store.delete_member(call.member_id)
        case WriteStatus():
            return store.write_status(call.row)
        case ReadStreams():
            return store.read_streams()
        case PutStream():
            return store.put_stream(call.row)
        case WriteStream():
            return store.write_stream(call.row, call.expected_version)
        case CreateLease():
            return store.create_lease(call.row)
        case ReadLeases():
            return store.read_leases(with_finished=call.with_finished)
        case ReadLease():
            return store.read_lease(call.key)
        case TakeLease():
            return store.take_lease(
                call.key,
                call.member_id,
                expected_owner=call.expected_owner,
                expected_version=call.expected_version,
                epoch_floor=call.epoch_floor,
            )
        case WriteLease():
            return store.write_lease(call.row, member_id=call.member_id, expected_version=call.expected_version)
        case DeleteLease():
            return store.delete_lease(call.key, call.expected_version)
        case WriteControl():
            return store.write_control(call.row)
    raise AssertionError(f"not a store call: {call}")
