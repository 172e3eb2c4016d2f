"""Kinesis, as far as a producer needs it: three of the calls of `kinesis.py`, under the same rules."""

from collections.abc import Sequence
from typing import Protocol

from anabranch._model.shard_filters import ShardFilter
from anabranch._model.streams import StreamName
from anabranch._wire.messages import ListShardsResponse, PutRecordsEntry, PutRecordsResponse, StreamSummary

__all__ = ["KinesisWriting"]


class KinesisWriting(Protocol):
    async def put_records(self, stream: StreamName, entries: Sequence[PutRecordsEntry]) -> PutRecordsResponse: ...

    async def list_shards(
        self,
        stream: StreamName,
        *,
        shard_filter: ShardFilter | None = None,
        next_token: str | None = None,
        max_results: int | None = None,
    ) -> ListShardsResponse: ...

    async def describe_stream_summary(self, stream: StreamName) -> StreamSummary: ...
