"""The rare calls that change streams (create, delete, split, merge, scale) and look over the account. Through botocore,
typed here.

A change is only begun by its call, and made by the service then; `describe_stream_summary` tells when it is done.
"""

from typing import Any

import msgspec

from anabranch._aws.account import AwsAccount
from anabranch._aws.botocore_calls import BotocoreCalls
from anabranch._model.streams import StreamName
from anabranch._wire.bodies import stream_members

__all__ = ["AccountLimits", "KinesisControl", "ListedStream"]


class ListedStream(msgspec.Struct, frozen=True, kw_only=True):
    """A stream in the account's list. Only its name is certain: other servers than AWS's may tell nothing more."""

    name: str
    arn: str | None = None
    status: str | None = None
    stream_mode: str | None = None
    created_seconds: float | None = None


class AccountLimits(msgspec.Struct, frozen=True, kw_only=True):
    """What the account has and may have, in one region."""

    open_shard_count: int
    shard_count_max: int
    on_demand_stream_count: int | None = None
    on_demand_stream_count_max: int | None = None


class KinesisControl:
    def __init__(self, account: AwsAccount, *, region: str | None = None) -> None:
        self._botocore = BotocoreCalls(account, "kinesis", region=region)

    def close(self) -> None:
        self._botocore.close()

    async def create_stream(self, name: str, *, shard_count: int | None = None) -> None:
        """On demand where no number of shards is given."""
        mode = "ON_DEMAND" if shard_count is None else "PROVISIONED"
        await self._botocore.call(
            "CreateStream", StreamName=name, ShardCount=shard_count, StreamModeDetails={"StreamMode": mode}
        )

    async def delete_stream(self, stream: StreamName, *, with_consumers: bool = False) -> None:
        await self._botocore.call("DeleteStream", EnforceConsumerDeletion=with_consumers, **stream_members(stream))

    async def split_shard(self, stream: StreamName, shard_id: str, new_starting_hash_key: int) -> None:
        await self._botocore.call(
            "SplitShard",
            ShardToSplit=shard_id,
            NewStartingHashKey=str(new_starting_hash_key),
            **stream_members(stream),
        )

    async def merge_shards(self, stream: StreamName, shard_id: str, adjacent_shard_id: str) -> None:
        await self._botocore.call(
            "MergeShards", ShardToMerge=shard_id, AdjacentShardToMerge=adjacent_shard_id, **stream_members(stream)
        )

    async def update_shard_count(self, stream: StreamName, shard_count: int) -> None:
        await self._botocore.call(
            "UpdateShardCount",
            TargetShardCount=shard_count,
            ScalingType="UNIFORM_SCALING",
            **stream_members(stream),
        )

    async def increase_retention(self, stream: StreamName, hours: int) -> None:
        await self._botocore.call("IncreaseStreamRetentionPeriod", RetentionPeriodHours=hours, **stream_members(stream))

    async def list_streams(self) -> list[ListedStream]:
        """All of them, page by page."""
        found: list[ListedStream] = []
        token: str | None = None
        last: str | None = None
        while True:
            page = await self._botocore.call(
                "ListStreams", NextToken=token, ExclusiveStartStreamName=None if token is not None else last
            )
            described = {summary["StreamName"]: summary for summary in page.get("StreamSummaries", ())}
            found += [_listed(name, described.get(name, {})) for name in page["StreamNames"]]
            if not page.get("HasMoreStreams") or not page["StreamNames"]:
                return found
            token = page.get("NextToken")  # older servers know only the name to go on after
            last = page["StreamNames"][-1]

    async def describe_limits(self) -> AccountLimits:
        answer = await self._botocore.call("DescribeLimits")
        return AccountLimits(
            open_shard_count=answer["OpenShardCount"],
            shard_count_max=answer["ShardLimit"],
            on_demand_stream_count=answer.get("OnDemandStreamCount"),
            on_demand_stream_count_max=answer.get("OnDemandStreamCountLimit"),
        )


def _listed(name: str, summary: dict[str, Any]) -> ListedStream:
    created = summary.get("StreamCreationTimestamp")
    return ListedStream(
        name=name,
        arn=summary.get("StreamARN"),
        status=summary.get("StreamStatus"),
        stream_mode=summary.get("StreamModeDetails", {}).get("StreamMode"),
        created_seconds=None if created is None else created.timestamp(),
    )
