"""The ways to take records that a consumer offers: a handler of records or of batches, a loop over either, and a loop
that acknowledges by hand. Each ends when the consumer does, or when the loop's body fails.
"""

import asyncio
import sys
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from typing import Any, Final

from anabranch._core.handling.batches import BatchLimits
from anabranch._engine.consumer_run import ConsumerRun
from anabranch._engine.handler_calls import HandlerCall
from anabranch.records import Record
from anabranch.testing.checkers import Call
from anabranch.testing.world.labour import Labour
from anabranch.testing.world.options import Form

__all__ = ["FORMS"]

_BATCHES: Final = BatchLimits(max_records=10, max_wait_ms=500)
_DRAIN_SECONDS: Final = 20.0
_HANDS: Final = 8
"""Records that are worked on at once where they are acknowledged by hand."""


async def _run(consuming: ConsumerRun, labour: Labour) -> None:
    await consuming.start(consuming.handle_records(HandlerCall(labour.handle, threads=1)))
    await consuming.wait()


async def _run_batches(consuming: ConsumerRun, labour: Labour) -> None:
    await consuming.start(consuming.handle_batches(HandlerCall(labour.handle_batch, threads=1), _BATCHES))
    await consuming.wait()


async def _each_record(consuming: ConsumerRun, labour: Labour) -> None:
    try:
        async with aclosing(consuming.records()) as records:
            async for record in records:
                await labour.walk([record])
    finally:
        await _leave(consuming)


async def _each_batch(consuming: ConsumerRun, labour: Labour) -> None:
    try:
        async with aclosing(consuming.batches(_BATCHES)) as batches:
            async for batch in batches:
                await labour.walk(batch.records)
    finally:
        await _leave(consuming)


async def _by_hand(consuming: ConsumerRun, labour: Labour) -> None:
    hands = asyncio.Semaphore(_HANDS)
    try:
        async with asyncio.TaskGroup() as group, aclosing(consuming.records(by_hand=True)) as records:
            async for record in records:
                # Begun in the step that hands it out: a queue of ours would let the fence pass unseen.
                group.create_task(_acknowledge(record, labour.begin([record]), consuming, labour, hands))
                await hands.acquire()
    finally:
        await _leave(consuming)


async def _acknowledge(
    record: Record[Any], calls: list[Call], consuming: ConsumerRun, labour: Labour, hands: asyncio.Semaphore
) -> None:
    try:
        await labour.retry_store_call([record], calls)
        consuming.ack([record])
    finally:
        hands.release()


async def _leave(consuming: ConsumerRun) -> None:
    """What leaving `async with Consumer` does, with the error that leaves it, if there is one."""
    await consuming.leave(sys.exception(), _DRAIN_SECONDS)


FORMS: Final[dict[Form, Callable[[ConsumerRun, Labour], Awaitable[None]]]] = {
    "batches": _each_batch,
    "by_hand": _by_hand,
    "records": _each_record,
    "run": _run,
    "run_batches": _run_batches,
}
