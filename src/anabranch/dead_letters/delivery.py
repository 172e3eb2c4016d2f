"""The two ways in which a letter is delivered again: to the handler, or back into the stream."""

from collections.abc import Callable
from typing import Any, Protocol

import msgspec

from anabranch._aws.kinesis_client import KinesisByRegion
from anabranch._core.handling.batches import BatchLimits
from anabranch._core.handling.failures import UndecodableError
from anabranch._engine.clock import SystemClock
from anabranch._engine.handler_calls import HandlerCall, HandlerOptions, TimeLimit
from anabranch._model.streams import StreamName, parse_stream
from anabranch._wire.messages import PutRecordsEntry
from anabranch.config import Aws
from anabranch.errors import TransportError
from anabranch.letters import Letter
from anabranch.records import Batch, Context, Record


class RegisteredHandler(msgspec.Struct, frozen=True):
    """What a redrive needs of a consumer."""

    handler: Callable[..., Any]
    batches: BatchLimits | None
    """None: it handles records."""
    options: HandlerOptions
    app: str | None = None
    streams: tuple[str, ...] = ()
    """Letters of other applications and streams are not for this handler."""

    def takes(self, letter: Letter) -> bool:
        return (self.app is None or letter.app == self.app) and (not self.streams or letter.stream in self.streams)


class HasHandler(Protocol):
    """A Consumer."""

    @property
    def registered_handler(self) -> RegisteredHandler: ...


class LetterDelivery(Protocol):
    async def deliver(self, letter: Letter, attempt: int) -> None:
        """Raises what the handler raises, or why the stream did not take the record."""

    async def close(self) -> None: ...


class HandlerDelivery:
    """Calls the handler as a consumer does: decoded, in a thread if it is a plain function, within its timeout. There
    is no lease, so the fence token is 0; a batch handler gets a batch of one.
    """

    def __init__(self, registered: RegisteredHandler, concurrency: int) -> None:
        self._options = registered.options
        self._is_batch_handler = registered.batches is not None
        self._call = HandlerCall(registered.handler, threads=concurrency)
        self._limit = TimeLimit(SystemClock(), registered.options.policy.timeout)

    async def deliver(self, letter: Letter, attempt: int) -> None:
        record: Record[Any] = letter.record()
        if self._options.decode is not None:
            try:
                record = self._options.decode(record)
            except UndecodableError as error:
                raise error.cause from error
        item: Any = record
        if self._is_batch_handler:
            item = Batch(stream=record.stream, shard_id=record.shard_id, records=[record])
        context = Context(attempt=attempt, fence_token=0, deadline=self._limit.seconds)
        async with self._limit.of_call():
            await self._call(item, context, lambda: True)

    async def close(self) -> None:
        self._call.close()


class StreamDelivery:
    """Writes the record's bytes to the stream again, under its key. It arrives as a new record, after all others."""

    def __init__(self, stream: StreamName | None, aws: Aws | None) -> None:
        self._stream = stream
        self._kinesis = KinesisByRegion(aws)

    async def deliver(self, letter: Letter, attempt: int) -> None:  # noqa: ARG002 -- each attempt is the same
        record = letter.record()
        entry = PutRecordsEntry(record.data, record.partition_key, record.explicit_hash_key)
        stream = self._stream or parse_stream(letter.stream)
        (result,) = (await self._kinesis.put_records(stream, [entry])).entries
        if result.error_code is not None:
            raise TransportError(f"{stream} did not take the record: {result.error_code}: {result.error_message}")

    async def close(self) -> None:
        await self._kinesis.close()
