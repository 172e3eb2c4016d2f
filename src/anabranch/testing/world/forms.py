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
from anabranch.testing.journal import RecordCall
from anabranch.testing.world.labour import Labour
from anabranch.testing.world.options import Form

__all__ = ["FORMS"]

_BATCHES: Final = BatchLimits(max_records=10, max_wait_ms=500)
_DRAIN_SECONDS: Final = 20.0
_HANDS: Final = 8
"""Records that are worked on at once where they are acknowledged by hand."""


async def _run(run: ConsumerRun, labour: Labour) -> None:
    await run.start(run.handle_records(HandlerCall(labour.handle, threads=1)))
    await run.wait()


async def _run_batches(run: ConsumerRun, labour: Labour) -> None:
    await run.start(run.handle_batches(HandlerCall(labour.handle_batch, threads=1), _BATCHES))
    await run.wait()


async def _each_record(run: ConsumerRun, labour: Labour) -> None:
    try:
        async with aclosing(run.records()) as records:
            async for record in records:
                await labour.walk([record])
    finally:
        await _leave(run)


async def _each_batch(run: ConsumerRun, labour: Labour) -> None:
    try:
        async with aclosing(run.batches(_BATCHES)) as batches:
            async for batch in batches:
                await labour.walk(batch.records)
    finally:
        await _leave(run)


async def _manual_ack(run: ConsumerRun, labour: Labour) -> None:
    hands = asyncio.Semaphore(_HANDS)
    try:
        async with asyncio.TaskGroup() as group, aclosing(run.records(manual_ack=True)) as records:
            async for record in records:
                # Begun in the step that hands it out: a queue of ours would let the fence pass unseen.
                group.create_task(_acknowledge(record, labour.begin([record]), run, labour, hands))
                await hands.acquire()
    finally:
        await _leave(run)


async def _acknowledge(
    record: Record[Any], calls: list[RecordCall], run: ConsumerRun, labour: Labour, hands: asyncio.Semaphore
) -> None:
    try:
        await labour.retry_store_call([record], calls)
        run.ack([record])
    finally:
        hands.release()


async def _leave(run: ConsumerRun) -> None:
    """What leaving `async with Consumer` does, with the error that leaves it, if there is one."""
    await run.leave(sys.exception(), _DRAIN_SECONDS)


FORMS: Final[dict[Form, Callable[[ConsumerRun, Labour], Awaitable[None]]]] = {
    "batches": _each_batch,
    "by_hand": _manual_ack,
    "records": _each_record,
    "run": _run,
    "run_batches": _run_batches,
}
