"""The Kinesis data plane: the calls that carry data, and the small ones beside them.

Typed values in, typed values out. Request bodies are sent in pieces, answers are decoded straight from the receive
buffer. Nothing is retried here except the repairs in `service`. Reads, writes, all other calls and subscriptions each
have their own connections, so that none of them waits for another.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Final, Self, TypeVar

from anabranch._aws.account import AwsAccount
from anabranch._aws.errors import service_error
from anabranch._aws.service import (
    USER_AGENT,
    AwsService,
    ServiceName,
    make_dialer,
    open_service,
    request_id,
    server_seconds,
)
from anabranch._http.client.connection import ClientResponse, NoRoomError
from anabranch._http.client.limits import ClientTimeouts
from anabranch._http.client.stream_pool import BodyStream, StreamPool
from anabranch._model.streams import ShardFilter, StartingPosition, StreamName
from anabranch._wire import bodies
from anabranch._wire.event_stream import Message, MessageDecoder
from anabranch._wire.messages import (
    ConsumerDescription,
    GetRecordsResponse,
    ListShardsResponse,
    ListStreamConsumersResponse,
    PutRecordsEntry,
    PutRecordsResponse,
    StreamSummary,
    SubscribeToShardEvent,
)
from anabranch._wire.sigv4 import SignedHeaders
from anabranch.config import Aws
from anabranch.errors import CodecError, TransportError

T = TypeVar("T")

KINESIS: Final = ServiceName("kinesis", "Kinesis_20131202")


_CONNECTIONS_MAX: Final = {"reads": 64, "writes": 32, "others": 8}


async def open_kinesis(
    account: AwsAccount, *, region: str | None = None, timeouts: ClientTimeouts | None = None
) -> "KinesisClient":
    """Resolves region, endpoint and credentials, and raises if one is missing. Opens no connection."""
    timeouts = timeouts or ClientTimeouts()
    address = await account.address("kinesis", region=region)
    await account.credentials.get()
    service = await open_service(KINESIS, address, account.credentials, purposes=_CONNECTIONS_MAX, timeouts=timeouts)
    streams = StreamPool(await make_dialer(address, ("h2", "http/1.1"), timeouts), timeouts=timeouts)
    return KinesisClient(service, streams)


class KinesisClient:
    """Implements the Kinesis ports of the consumer and the producer, and the calls for fan-out."""

    def __init__(self, service: AwsService, streams: StreamPool) -> None:
        self.region = service.region
        self._service = service
        self._streams = streams

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Fails calls in progress with a TransportError, and returns when all connections are closed."""
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
        self,
        stream: StreamName,
        shard_iterator: str,
        *,
        limit: int | None = None,
        has_room: Callable[[int], bool] | None = None,
    ) -> GetRecordsResponse | None:
        try:
            return await self._service.call(
                "reads",
                "GetRecords",
                bodies.encode_get_records(stream, shard_iterator, limit=limit),
                _read_records,
                repeatable=True,
                has_room=has_room,
            )
        except NoRoomError:
            return None

    async def subscribe_to_shard(
        self, consumer_arn: str, shard_id: str, position: StartingPosition
    ) -> "EventSubscription":
        """Returns when the service has accepted the subscription. The caller closes it."""
        body = b"".join(bodies.encode_subscribe_to_shard(consumer_arn, shard_id, position))

        async def open_stream(signed: SignedHeaders) -> BodyStream:
            answer = await self._streams.open((*signed.pairs(), ("user-agent", USER_AGENT)), body)
            if isinstance(answer, ClientResponse):
                raise self._service.error_from("SubscribeToShard", answer)
            return answer

        stream = await self._service.send_signed("SubscribeToShard", [body], open_stream)
        return EventSubscription(stream)

    # Describing

    async def list_shards(
        self,
        stream: StreamName,
        *,
        shard_filter: ShardFilter | None = None,
        next_token: str | None = None,
        max_results: int | None = None,
    ) -> ListShardsResponse:
        pieces = bodies.encode_list_shards(
            stream, shard_filter=shard_filter, next_token=next_token, max_results=max_results
        )
        return await self._ask("ListShards", pieces, bodies.decode_list_shards)

    async def describe_stream_summary(self, stream: StreamName) -> StreamSummary:
        return await self._service.call(
            "others",
            "DescribeStreamSummary",
            bodies.encode_describe_stream_summary(stream),
            lambda response: bodies.decode_describe_stream_summary(
                response.body, server_seconds=server_seconds(response.headers)
            ),
            repeatable=True,
        )

    async def _ask(
        self, operation: str, pieces: Sequence[bytes], decode: Callable[[memoryview], T], *, repeatable: bool = True
    ) -> T:
        """For small calls whose result is only the body of the response."""
        return await self._service.call(
            "others", operation, pieces, lambda response: decode(response.body), repeatable=repeatable
        )

    # Writing

    async def put_records(self, stream: StreamName, entries: Sequence[PutRecordsEntry]) -> PutRecordsResponse:
        answer = await self._service.call(
            "writes",
            "PutRecords",
            bodies.encode_put_records(stream, entries),
            lambda response: bodies.decode_put_records(response.body, request_id=request_id(response.headers)),
            repeatable=False,
        )
        if len(answer.entries) != len(entries):
            raise TransportError(
                f"PutRecords: sent {len(entries)} records, but the answer has {len(answer.entries)}; "
                f"it is unknown which were written (request id {answer.request_id})"
            )
        return answer

    # Fan-out consumers

    async def register_stream_consumer(self, stream_arn: str, name: str) -> ConsumerDescription:
        pieces = bodies.encode_stream_consumer(stream_arn, name)
        decode = bodies.decode_register_stream_consumer
        return await self._ask("RegisterStreamConsumer", pieces, decode, repeatable=False)

    async def describe_stream_consumer(self, stream_arn: str, name: str) -> ConsumerDescription:
        pieces = bodies.encode_stream_consumer(stream_arn, name)
        return await self._ask("DescribeStreamConsumer", pieces, bodies.decode_describe_stream_consumer)

    async def list_stream_consumers(
        self, stream_arn: str, *, next_token: str | None = None
    ) -> ListStreamConsumersResponse:
        pieces = bodies.encode_list_stream_consumers(stream_arn, next_token=next_token)
        return await self._ask("ListStreamConsumers", pieces, bodies.decode_list_stream_consumers)

    async def deregister_stream_consumer(self, consumer_arn: str) -> None:
        pieces = bodies.encode_deregister_stream_consumer(consumer_arn)
        await self._ask("DeregisterStreamConsumer", pieces, lambda body: None, repeatable=False)  # noqa: ARG005 -- the answer has no body


def _read_records(response: ClientResponse) -> GetRecordsResponse:
    return bodies.decode_get_records(response.body, server_seconds=server_seconds(response.headers))


# The events of a subscription


class EventSubscription:
    """An accepted subscription: its messages, one at a time, as the reader has room for them."""

    def __init__(self, stream: BodyStream) -> None:
        self._stream = stream
        self._decoder = MessageDecoder()
        self._messages: deque[Message] = deque()
        self.server_seconds = server_seconds(stream.headers)

    async def next_bytes(self) -> int | None:
        """The length of the next message, as soon as its first bytes are there. None if the subscription ended after a
        complete message: its five minutes are over, or the shard has ended.
        """
        while True:
            if self._messages:
                return len(self._messages[0].payload)
            if expected_bytes := self._decoder.expected_bytes:
                return expected_bytes
            if not await self._fetch():
                if self._decoder.buffered_bytes:
                    raise TransportError(_CUT_OFF)
                return None

    async def receive(self) -> SubscribeToShardEvent | None:
        """Returns the next event, or None for a message of another kind. Raises an error that the service sent."""
        if not self._messages:
            self._stream.expect(self._decoder.expected_bytes - self._decoder.buffered_bytes)
        while not self._messages:
            if not await self._fetch():
                raise TransportError(_CUT_OFF)
        try:
            meaning = bodies.decode_subscription_message(self._messages.popleft())
        except CodecError as error:
            raise TransportError(f"SubscribeToShard: {error}") from error
        if isinstance(meaning, bodies.AwsError):
            raise service_error("SubscribeToShard", meaning, status=400, request_id=request_id(self._stream.headers))
        return meaning

    async def _fetch(self) -> bool:
        """Adds the bytes that have arrived; False at the end of the stream."""
        pieces = await self._stream.receive()
        try:
            for piece in pieces:
                self._messages += self._decoder.feed(piece)
        except CodecError as error:
            raise TransportError(f"SubscribeToShard: {error}") from error
        if self._messages:
            self._stream.progress()
        return bool(pieces)

    def close(self, *, silent: bool = False) -> None:
        """Closes the stream at once. `silent`: the service sent nothing for too long, so its connection may be dead."""
        self._stream.close(silent=silent)


_CUT_OFF: Final = "SubscribeToShard: the stream ended in the middle of a message"


# Several regions


class KinesisByRegion:
    """Kinesis for a producer that writes to streams of several regions: one client per region, opened on first use.

    A stream given by its ARN has its own region; one given by its name is in the account's. If a client cannot be
    opened (no region, no credentials), the call that needs it raises, and the next call tries again. Implements the
    Kinesis port of the producer. Belongs to one event loop.
    """

    def __init__(self, aws: Aws | None) -> None:
        self._account = AwsAccount(aws)
        self._account.start_thread()
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
        self, stream: StreamName, *, shard_filter: ShardFilter | None = None, next_token: str | None = None
    ) -> ListShardsResponse:
        client = await self.client(stream.region)
        return await client.list_shards(stream, shard_filter=shard_filter, next_token=next_token)

    async def describe_stream_summary(self, stream: StreamName) -> StreamSummary:
        client = await self.client(stream.region)
        return await client.describe_stream_summary(stream)

    async def close(self) -> None:
        for client in self._clients.values():
            await client.close()
        self._clients.clear()
        self._account.close()
