"""Kinesis, as far as a consumer needs it: reading, and looking at what there is.

Rules for every implementation: a call either returns its typed answer or raises `ServiceError` (the service
said no), `TransportError` (no usable answer; `maybe_sent` tells whether the service may have acted) or
`CredentialsError`. Nothing is retried inside: the engine decides. Cancelling a call gives up the answer at
once; the service may still act on the request.
"""

from typing import Protocol

from anabranch._model.shard_filters import ShardFilter
from anabranch._model.start_positions import StartingPosition
from anabranch._model.streams import StreamName
from anabranch._wire.messages import GetRecordsResponse, ListShardsResponse, StreamSummary

__all__ = ["Kinesis"]


class Kinesis(Protocol):
    # reading
    async def get_shard_iterator(self, stream: StreamName, shard_id: str, position: StartingPosition) -> str: ...

    async def get_records(
        self, stream: StreamName, shard_iterator: str, *, limit: int | None = None
    ) -> GetRecordsResponse: ...

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
