"""Performs the steps that the lease core decides: each store call with a deadline, each wait on the clock.

It knows no lease rule. A call without an answer is handed back as `NoAnswer`.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, Final, TypeVar

from anabranch._core.leases.machine import store_reset
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
    WriteLease,
    WriteStatus,
)
from anabranch._engine.ports import Ports
from anabranch._model.leases import AppRow
from anabranch._ports import Clock, LeaseStore
from anabranch.errors import LeaseStoreError, LeaseStoreInvalidError
from anabranch.events import StoreReset, StoreUnanswered

T = TypeVar("T")

PAUSE_MS: Final = 500
TRIES_MAX: Final = 60


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
        steps.close()  # if it was cancelled in a call: that has no answer
        after_step()


async def perform_call(store: LeaseStore, call: StoreCall[Any], deadline_ms: int) -> object:
    """What the store returned, or `NoAnswer`. What is wrong for good (no database, another schema) raises."""
    deadline_ms = call.deadline_ms or deadline_ms
    try:
        async with asyncio.timeout(deadline_ms / 1000):
            return await send(store, call)
    except (LeaseStoreError, TimeoutError) as error:
        return NoAnswer(str(error) or f"lease store {store} gave no answer within {deadline_ms} ms")


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
            return store.request_hand_off(call.donor, call.request)
        case DeleteMember():
            return store.delete_member(call.member_id)
        case WriteStatus():
            return store.write_status(call.row)
        case ReadStreams():
            return store.read_streams()
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
    raise AssertionError(f"not a store call: {call}")


async def retry_store_call(ports: Ports, call: Callable[[], Awaitable[T]], *, deadline_ms: int) -> T:
    """The answer of the first try that gets one within the deadline; the error of the last try, if none does. A try
    without an answer may still take effect: only reads, and writes of what does not exist yet, can be repeated.
    """
    for attempt in range(TRIES_MAX):
        try:
            async with asyncio.timeout(deadline_ms / 1000):
                return await call()
        except LeaseStoreError as error:
            ports.store_failures.count += 1
            if attempt == TRIES_MAX - 1:
                raise
            _tell_unanswered(ports, error, attempt + 1)
        except TimeoutError as error:
            ports.store_failures.count += 1
            if attempt == TRIES_MAX - 1:
                raise LeaseStoreError(
                    f"lease store {ports.store} gave no answer within {deadline_ms} ms, {TRIES_MAX} times in a row"
                ) from None
            _tell_unanswered(ports, error, attempt + 1)
        await ports.clock.sleep_until_ms(ports.clock.now_ms() + PAUSE_MS)
    raise AssertionError("unreachable")


def _tell_unanswered(ports: Ports, error: Exception, failures: int) -> None:
    """From the second failure on, then less and less often: one may be chance."""
    if failures > 1 and failures & (failures - 1) == 0:
        ports.emit(StoreUnanswered(error=str(error) or "it took too long", failure_count=failures))


def report_store_reset(ports: Ports, app: AppRow) -> LeaseStoreInvalidError:
    """Reports it; the error is to be raised (rule L14)."""
    ports.emit(StoreReset())
    return store_reset(app)
