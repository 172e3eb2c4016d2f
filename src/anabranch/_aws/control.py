"""Rare calls through botocore, in threads: they create, delete, reshard and list streams.

botocore's own retries are off: the caller retries. Its errors are translated into ours. Cancelling a call abandons the
response, but the thread still finishes the request. Changes are asynchronous: a call returns when the change starts,
and `describe_stream_summary` shows when it is done.
"""

import asyncio
from functools import partial
from typing import Any, Final

import msgspec

from anabranch._aws.account import AwsAccount
from anabranch._aws.credentials import NO_CREDENTIALS
from anabranch._aws.errors import service_error
from anabranch._daemon_threads import DaemonThreads
from anabranch._model.streams import StreamName
from anabranch._wire.bodies import AwsError, stream_members
from anabranch.errors import AnabranchError, CredentialsError, InvalidRequestError, TransportError, UsageError

_THREADS_MAX: Final = 4


class BotocoreCalls:
    """The calls of one service. They run in daemon threads: one without an answer does not keep the process alive."""

    def __init__(
        self,
        account: AwsAccount,
        service: str,
        *,
        region: str | None = None,
        endpoint_url: str | None = None,
        read_seconds_max: float | None = None,
    ) -> None:
        self._open_client = partial(
            account.client, service, region=region, endpoint_url=endpoint_url, read_seconds_max=read_seconds_max
        )
        self._threads = DaemonThreads(_THREADS_MAX, f"anabranch-{service}")
        self._client: Any = None
        self._client_lock = asyncio.Lock()

    async def call(self, operation: str, **parameters: Any) -> dict[str, Any]:
        """`operation` is the AWS name, such as `SplitShard`. Parameters that are None are omitted."""
        async with self._client_lock:
            if self._client is None:
                self._client = await self._open_client()
        given = {name: value for name, value in parameters.items() if value is not None}
        try:
            pending = self._threads.submit(partial(_call, self._client, operation, given))
        except RuntimeError:
            raise UsageError("this client is closed") from None
        return await asyncio.wrap_future(pending)

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
        if self._client is not None:
            self._client.close()


def _call(client: Any, operation: str, parameters: dict[str, Any]) -> dict[str, Any]:
    """Runs in a thread."""
    from botocore import xform_name  # noqa: PLC0415 -- botocore is loaded when first needed
    from botocore.exceptions import BotoCoreError, ClientError  # noqa: PLC0415 -- as above

    try:
        response: dict[str, Any] = getattr(client, xform_name(operation))(**parameters)
        if (body := response.get("Body")) is not None:  # of an S3 object; it still has to be received
            response["Body"] = body.read()
    except ClientError as error:
        raise _error_response(operation, error.response, client.meta.region_name) from error
    except (BotoCoreError, OSError) as error:
        raise _client_failure(operation, error) from error
    return response


def _error_response(operation: str, response: Any, region: str) -> AnabranchError:
    error, metadata = response.get("Error", {}), response.get("ResponseMetadata", {})
    return service_error(
        operation,
        AwsError(error.get("Code"), error.get("Message") or ""),
        status=metadata.get("HTTPStatusCode", 400),
        request_id=metadata.get("RequestId"),
        region=region,
    )


def _client_failure(operation: str, error: Exception) -> AnabranchError:
    from botocore import exceptions  # noqa: PLC0415 -- botocore is loaded when first needed

    if isinstance(error, exceptions.NoCredentialsError | exceptions.PartialCredentialsError):
        return CredentialsError(NO_CREDENTIALS)
    if isinstance(error, exceptions.CredentialRetrievalError | exceptions.TokenRetrievalError):
        return CredentialsError(f"cannot fetch or refresh the AWS credentials: {error}")
    if isinstance(error, exceptions.ParamValidationError):
        return InvalidRequestError(str(error), operation=operation, code="ParamValidation")
    if isinstance(error, exceptions.EndpointConnectionError):
        return TransportError(
            f"{operation}: cannot connect to {error.kwargs.get('endpoint_url')}: check that the server "
            "is running, and the region, endpoint_url, DNS and proxy",
            maybe_sent=False,
        )
    return TransportError(f"{operation}: {error}")


class ListedStream(msgspec.Struct, frozen=True, kw_only=True):
    """A stream in ListStreams. Servers other than AWS may return only the name."""

    name: str
    arn: str | None = None
    status: str | None = None
    stream_mode: str | None = None
    created_seconds: float | None = None


class AccountLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Usage and quotas of the account in one region."""

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
        """Creates an on-demand stream if `shard_count` is None."""
        mode = "ON_DEMAND" if shard_count is None else "PROVISIONED"
        await self._botocore.call(
            "CreateStream", StreamName=name, ShardCount=shard_count, StreamModeDetails={"StreamMode": mode}
        )

    async def delete_stream(self, stream: StreamName, *, with_consumers: bool = False) -> None:
        await self._botocore.call("DeleteStream", EnforceConsumerDeletion=with_consumers, **stream_members(stream))

    async def split_shard(self, stream: StreamName, shard_id: str, new_starting_hash_key: int) -> None:
        await self._botocore.call(
            "SplitShard", ShardToSplit=shard_id, NewStartingHashKey=str(new_starting_hash_key), **stream_members(stream)
        )

    async def merge_shards(self, stream: StreamName, shard_id: str, adjacent_shard_id: str) -> None:
        await self._botocore.call(
            "MergeShards", ShardToMerge=shard_id, AdjacentShardToMerge=adjacent_shard_id, **stream_members(stream)
        )

    async def update_shard_count(self, stream: StreamName, shard_count: int) -> None:
        await self._botocore.call(
            "UpdateShardCount", TargetShardCount=shard_count, ScalingType="UNIFORM_SCALING", **stream_members(stream)
        )

    async def increase_retention(self, stream: StreamName, hours: int) -> None:
        await self._botocore.call("IncreaseStreamRetentionPeriod", RetentionPeriodHours=hours, **stream_members(stream))

    async def list_streams(self) -> list[ListedStream]:
        found: list[ListedStream] = []
        token: str | None = None
        last_name: str | None = None
        while True:
            page = await self._botocore.call(
                "ListStreams", NextToken=token, ExclusiveStartStreamName=None if token is not None else last_name
            )
            summaries = {summary["StreamName"]: summary for summary in page.get("StreamSummaries", ())}
            found += [_listed_stream(name, summaries.get(name, {})) for name in page["StreamNames"]]
            if not page.get("HasMoreStreams") or not page["StreamNames"]:
                return found
            token = page.get("NextToken")  # older servers know only ExclusiveStartStreamName
            last_name = page["StreamNames"][-1]

    async def describe_limits(self) -> AccountLimits:
        response = await self._botocore.call("DescribeLimits")
        return AccountLimits(
            open_shard_count=response["OpenShardCount"],
            shard_count_max=response["ShardLimit"],
            on_demand_stream_count=response.get("OnDemandStreamCount"),
            on_demand_stream_count_max=response.get("OnDemandStreamCountLimit"),
        )


def _listed_stream(name: str, summary: dict[str, Any]) -> ListedStream:
    created = summary.get("StreamCreationTimestamp")
    return ListedStream(
        name=name,
        arn=summary.get("StreamARN"),
        status=summary.get("StreamStatus"),
        stream_mode=summary.get("StreamModeDetails", {}).get("StreamMode"),
        created_seconds=None if created is None else created.timestamp(),
    )
