"""Kinesis for a producer that may write to streams of several regions: one client for each, opened when first needed.

A stream given by its ARN has its own region; one given by its name is in the account's. Errors of opening (no
region, no credentials) are raised by the call that needed the client, each time: the next one tries again.
"""

import asyncio
from collections.abc import Sequence

from anabranch._aws.account import AwsAccount
from anabranch._aws.kinesis_client import KinesisClient, open_kinesis
from anabranch._model.shard_filters import ShardFilter
from anabranch._model.streams import StreamName
from anabranch._wire.messages import ListShardsResponse, PutRecordsEntry, PutRecordsResponse, StreamSummary
from anabranch.config import Aws

__all__ = ["KinesisByRegion"]


class KinesisByRegion:
    """Fulfils `_ports.kinesis_writing.KinesisWriting`. Belongs to one event loop."""

    def __init__(self, aws: Aws | None) -> None:
        self._account = AwsAccount(aws)
        self._clients: dict[str | None, KinesisClient] = {}
        self._opening = asyncio.Lock()

    async def client(self, region: str | None = None) -> KinesisClient:
        if (client := self._clients.get(region)) is None:
            async with self._opening:
                if (client := self._clients.get(region)) is None:
                    client = self._clients[region] = await open_kinesis(self._account, region=region)
        return client

    async def put_records(self, stream: StreamName, entries: Sequence[PutRecordsEntry]) -> PutRecordsResponse:
        client = self._clients.get(stream.region) or await self.client(stream.region)
        return await client.put_records(stream, entries)

    async def list_shards(
        self,
        stream: StreamName,
        *,
        shard_filter: ShardFilter | None = None,
        next_token: str | None = None,
        max_results: int | None = None,
    ) -> ListShardsResponse:
        client = await self.client(stream.region)
        return await client.list_shards(
            stream, shard_filter=shard_filter, next_token=next_token, max_results=max_results
        )

    async def describe_stream_summary(self, stream: StreamName) -> StreamSummary:
        client = await self.client(stream.region)
        return await client.describe_stream_summary(stream)

    async def close(self) -> None:
        for client in self._clients.values():
            await client.close()
        self._clients.clear()
        self._account.close()
