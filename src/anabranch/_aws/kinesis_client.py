"""Kinesis's data plane: the calls that carry data, and the small ones beside them.

Typed values in, typed values out; bodies go out in pieces and answers are decoded straight from the receive buffer.
Nothing is retried here beyond the repairs of `service`. Reads, writes and everything else have connections of their
own, so that none of them waits for another; subscriptions have theirs too.
"""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from types import TracebackType
from typing import Final, Literal, Self

from anabranch._aws.account import AwsAccount
from anabranch._aws.service import (
    USER_AGENT,
    AwsService,
    ServiceName,
    make_dialer,
    open_service,
    request_id,
)
from anabranch._aws.subscription import read_events
from anabranch._http.client.body_stream import BodyStream
from anabranch._http.client.connection import ClientResponse
from anabranch._http.client.limits import ClientTimeouts
from anabranch._http.client.stream_pool import StreamPool
from anabranch._model.shard_filters import ShardFilter
from anabranch._model.start_positions import StartingPosition
from anabranch._model.streams import StreamName
from anabranch._wire import bodies
from anabranch._wire.messages import (
    ConsumerDescription,
    GetRecordsResponse,
    ListShardsResponse,
    ListStreamConsumersResponse,
    PutRecordResponse,
    PutRecordsEntry,
    PutRecordsResponse,
    StreamSummary,
    SubscribeToShardEvent,
)
from anabranch.errors import ServiceError, TransportError

__all__ = ["ClientSettings", "KinesisClient", "open_kinesis"]

KINESIS: Final = ServiceName("kinesis", "Kinesis_20131202")


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientSettings:
    """How many connections there may be for each purpose, and how long things may take."""

    read_connections_max: int = 64
    write_connections_max: int = 32
    other_connections_max: int = 8
    subscriptions_max: int = 1_000
    http2: Literal["auto", "always", "never"] = "auto"
    """For subscriptions: `auto` lets TLS decide and speaks HTTP/1.1 in clear text, `always` speaks HTTP/2 there too."""
    timeouts: ClientTimeouts = field(default_factory=ClientTimeouts)


async def open_kinesis(
    account: AwsAccount, *, region: str | None = None, settings: ClientSettings | None = None
) -> "KinesisClient":
    """Finds region, endpoint and credentials: what is missing is said before the first call. Opens no connection."""
    settings = settings or ClientSettings()
    timeouts = settings.timeouts
    address = await account.address("kinesis", region=region)
    await account.credentials.get()
    service = await open_service(
        KINESIS,
        address,
        account.credentials,
        purposes={
            "reads": settings.read_connections_max,
            "writes": settings.write_connections_max,
            "others": settings.other_connections_max,
        },
        timeouts=timeouts,
    )
    alpn = ("http/1.1",) if settings.http2 == "never" else ("h2", "http/1.1")
    streams = StreamPool(
        await make_dialer(address, alpn, timeouts),
        http2=settings.http2,
        streams_max=settings.subscriptions_max,
        timeouts=timeouts,
    )
    return KinesisClient(service, streams)


class KinesisClient:
    """Fulfils `_ports.kinesis.Kinesis` and `_ports.kinesis_writing.KinesisWriting`, and has the calls of fan-out."""

    def __init__(self, service: AwsService, streams: StreamPool) -> None:
        self._service = service
        self._streams = streams

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Ends what is under way with a TransportError, and returns when every connection is gone."""
        await self._streams.close()
        await self._service.close()

    # Reading

    async def get_shard_iterator(self, stream: StreamName, shard_id: str, position: StartingPosition) -> str:
        return await self._service.call(
            "reads",
            "GetShardIterator",
            bodies.encode_get_shard_iterator(stream, shard_id, position),
            lambda response: bodies.decode_get_shard_iterator(response.body),
            repeatable=True,
        )

    async def get_records(
        self, stream: StreamName, shard_iterator: str, *, limit: int | None = None
    ) -> GetRecordsResponse:
        return await self._service.call(
            "reads",
            "GetRecords",
            bodies.encode_get_records(stream, shard_iterator, limit=limit),
            self._read_records,
            repeatable=True,
        )

    def _read_records(self, response: ClientResponse) -> GetRecordsResponse:
        return bodies.decode_get_records(response.body, server_seconds=self._service.server_seconds(response))

    @asynccontextmanager
    async def subscribe_to_shard(
        self, consumer_arn: str, shard_id: str, position: StartingPosition
    ) -> AsyncIterator[AsyncIterator[SubscribeToShardEvent]]:
        """Entering returns once the service has accepted the subscription; leaving closes it at once."""
        body = b"".join(bodies.encode_subscribe_to_shard(consumer_arn, shard_id, position))
        stream = await self._open_stream("SubscribeToShard", body)
        events = read_events(stream)
        try:
            yield events
        finally:
            self._streams.close_stream(stream)
            await events.aclose()

    async def _open_stream(self, operation: str, body: bytes) -> BodyStream:
        offset_ms = self._service.clock_offset_ms
        try:
            return await self._try_stream(operation, body)
        except ServiceError as error:
            if not await self._service.repair(error, offset_ms):
                raise
        return await self._try_stream(operation, body)

    async def _try_stream(self, operation: str, body: bytes) -> BodyStream:
        signed = self._service.sign(await self._service.credentials(), operation, [body])
        answer = await self._streams.open((*signed.pairs(), ("user-agent", USER_AGENT)), body)
        if isinstance(answer, ClientResponse):
            raise self._service.refusal(operation, answer)
        return answer

    # What there is

    async def list_shards(
        self,
        stream: StreamName,
        *,
        shard_filter: ShardFilter | None = None,
        next_token: str | None = None,
        max_results: int | None = None,
    ) -> ListShardsResponse:
        return await self._service.call(
            "others",
            "ListShards",
            bodies.encode_list_shards(
                stream, shard_filter=shard_filter, next_token=next_token, max_results=max_results
            ),
            lambda response: bodies.decode_list_shards(response.body),
            repeatable=True,
        )

    async def describe_stream_summary(self, stream: StreamName) -> StreamSummary:
        return await self._service.call(
            "others",
            "DescribeStreamSummary",
            bodies.encode_describe_stream_summary(stream),
            lambda response: bodies.decode_describe_stream_summary(
                response.body, server_seconds=self._service.server_seconds(response)
            ),
            repeatable=True,
        )

    # Writing

    async def put_record(self, stream: StreamName, entry: PutRecordsEntry) -> PutRecordResponse:
        return await self._service.call(
            "writes",
            "PutRecord",
            bodies.encode_put_record(stream, entry),
            lambda response: bodies.decode_put_record(response.body, request_id=request_id(response)),
            repeatable=False,
        )

    async def put_records(self, stream: StreamName, entries: Sequence[PutRecordsEntry]) -> PutRecordsResponse:
        answer = await self._service.call(
            "writes",
            "PutRecords",
            bodies.encode_put_records(stream, entries),
            lambda response: bodies.decode_put_records(response.body, request_id=request_id(response)),
            repeatable=False,
        )
        if len(answer.entries) != len(entries):
            raise TransportError(
                f"PutRecords: {len(entries)} records were sent and {len(answer.entries)} answered; "
                f"which of them were written cannot be told (request id {answer.request_id})"
            )
        return answer

    # Fan-out consumers

    async def register_stream_consumer(self, stream_arn: str, name: str) -> ConsumerDescription:
        return await self._service.call(
            "others",
            "RegisterStreamConsumer",
            bodies.encode_register_stream_consumer(stream_arn, name),
            lambda response: bodies.decode_register_stream_consumer(response.body),
            repeatable=False,
        )

    async def describe_stream_consumer(
        self, *, stream_arn: str | None = None, name: str | None = None, consumer_arn: str | None = None
    ) -> ConsumerDescription:
        return await self._service.call(
            "others",
            "DescribeStreamConsumer",
            bodies.encode_describe_stream_consumer(stream_arn=stream_arn, name=name, consumer_arn=consumer_arn),
            lambda response: bodies.decode_describe_stream_consumer(response.body),
            repeatable=True,
        )

    async def list_stream_consumers(
        self, stream_arn: str, *, next_token: str | None = None, max_results: int | None = None
    ) -> ListStreamConsumersResponse:
        return await self._service.call(
            "others",
            "ListStreamConsumers",
            bodies.encode_list_stream_consumers(stream_arn, next_token=next_token, max_results=max_results),
            lambda response: bodies.decode_list_stream_consumers(response.body),
            repeatable=True,
        )

    async def deregister_stream_consumer(self, consumer_arn: str) -> None:
        await self._service.call(
            "others",
            "DeregisterStreamConsumer",
            bodies.encode_deregister_stream_consumer(consumer_arn),
            lambda response: None,  # noqa: ARG005 -- its answer has no body
            repeatable=False,
        )
