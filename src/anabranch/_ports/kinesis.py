"""Kinesis, as far as the engine needs it: the calls that carry data and the small ones beside them.

Rules for every implementation: a call either returns its typed answer or raises `ServiceError` (the service
said no), `TransportError` (no usable answer; `maybe_sent` tells whether the service may have acted) or
`CredentialsError`. Nothing is retried inside: the engine decides. Cancelling a call gives up the answer at
once; the service may still act on the request.
"""

from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Protocol

from anabranch._model.shard_filters import ShardFilter
from anabranch._model.start_positions import StartingPosition
from anabranch._model.streams import StreamName
from anabranch._wire.messages import (
    ConsumerDescription,
    GetRecordsResponse,
    ListShardsResponse,
    PutRecordResponse,
    PutRecordsEntry,
    PutRecordsResponse,
    StreamSummary,
    SubscribeToShardEvent,
)

__all__ = ["Kinesis"]


class Kinesis(Protocol):
    # reading
    async def get_shard_iterator(self, stream: StreamName, shard_id: str, position: StartingPosition) -> str: ...

    async def get_records(
        self, stream: StreamName, shard_iterator: str, *, limit: int | None = None
    ) -> GetRecordsResponse: ...

    def subscribe_to_shard(
        self, consumer_arn: str, shard_id: str, position: StartingPosition
    ) -> AbstractAsyncContextManager[AsyncIterator[SubscribeToShardEvent]]:
        """Entering returns once the service has accepted the subscription; leaving closes it at once."""

    # what there is
    async def list_shards(
        self,
        stream: StreamName,
        *,
        shard_filter: ShardFilter | None = None,
        next_token: str | None = None,
        max_results: int | None = None,
    ) -> ListShardsResponse: ...

    async def describe_stream_summary(self, stream: StreamName) -> StreamSummary: ...

    # writing
    async def put_record(self, stream: StreamName, entry: PutRecordsEntry) -> PutRecordResponse: ...

    async def put_records(self, stream: StreamName, entries: Sequence[PutRecordsEntry]) -> PutRecordsResponse: ...

    # fan-out consumers
    async def register_stream_consumer(self, stream_arn: str, name: str) -> ConsumerDescription: ...

    async def describe_stream_consumer(
        self, *, stream_arn: str | None = None, name: str | None = None, consumer_arn: str | None = None
    ) -> ConsumerDescription: ...

    async def deregister_stream_consumer(self, consumer_arn: str) -> None: ...
