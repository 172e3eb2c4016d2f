"""The local Kinesis by other clients than boto3: aiobotocore, CBOR as Java's SDK writes it, and HTTP/2 by h2."""

import asyncio
import base64
import http.client
import json
import ssl
import struct
from datetime import UTC, datetime

import aiobotocore.session
import h2.config
import h2.connection
import h2.events
import pytest
from botocore.config import Config

from anabranch._wire.event_stream import MessageDecoder
from anabranch.local import LocalKinesis, cbor
from patience import PATIENCE

SHARD_0 = "shardId-000000000000"
AUTHORIZATION = (
    "AWS4-HMAC-SHA256 Credential=a/20261116/us-east-1/kinesis/aws4_request, SignedHeaders=host, Signature=00"
)


def headers_of(operation, content_type="application/x-amz-json-1.1"):
    return {
        "content-type": content_type,
        "x-amz-target": f"Kinesis_20131202.{operation}",
        "x-amz-date": "20261116T000000Z",
        "authorization": AUTHORIZATION,
    }


# aiobotocore


def test_aiobotocore_writes_polls_and_subscribes(kinesis, goodbyes):
    async def main():
        session = aiobotocore.session.get_session()
        async with session.create_client(
            "kinesis",
            region_name="us-east-1",
            endpoint_url=kinesis.endpoint_url,
            verify=kinesis.certificate,
            aws_access_key_id="local",
            aws_secret_access_key="local",
            config=Config(retries={"total_max_attempts": 1}),
        ) as client:
            await client.create_stream(StreamName="orders", ShardCount=1)
            await client.put_record(StreamName="orders", Data=b"one", PartitionKey="key")
            iterator = await client.get_shard_iterator(
                StreamName="orders",
                ShardId=SHARD_0,
                ShardIteratorType="AT_TIMESTAMP",
                Timestamp=datetime(2020, 1, 1, tzinfo=UTC),
            )
            answer = await client.get_records(ShardIterator=iterator["ShardIterator"])
            assert [record["Data"] for record in answer["Records"]] == [b"one"]
            summary = await client.describe_stream_summary(StreamName="orders")
            consumer = await client.register_stream_consumer(
                StreamARN=summary["StreamDescriptionSummary"]["StreamARN"], ConsumerName="reader"
            )
            subscription = await client.subscribe_to_shard(
                ConsumerARN=consumer["Consumer"]["ConsumerARN"],
                ShardId=SHARD_0,
                StartingPosition={"Type": "TRIM_HORIZON"},
            )
            payloads = []
            async for event in subscription["EventStream"]:
                payloads += [record["Data"] for record in event["SubscribeToShardEvent"]["Records"]]
                if len(payloads) == 2:
                    break
                await client.put_record(StreamName="orders", Data=b"two", PartitionKey="key")
            assert payloads == [b"one", b"two"]
            subscription["EventStream"].close()
        await goodbyes()

    asyncio.run(asyncio.wait_for(main(), 20))


# CBOR


def text(value):
    raw = value.encode()
    return (bytes([0x60 | len(raw)]) if len(raw) < 24 else b"\x78" + bytes([len(raw)])) + raw


class CborClient:
    """Writes maps and arrays of indefinite length, as Java's Jackson does."""

    def __init__(self, endpoint_url):
        self._connection = http.client.HTTPConnection(endpoint_url.removeprefix("http://"), timeout=PATIENCE)

    def call(self, operation, body):
        self._connection.request("POST", "/", body, headers_of(operation, "application/x-amz-cbor-1.1"))
        response = self._connection.getresponse()
        raw = response.read()
        assert response.headers["content-type"] == "application/x-amz-cbor-1.1"
        return response.status, raw

    def close(self):
        self._connection.close()


@pytest.fixture
def cbor_client(plain_kinesis):
    client = CborClient(plain_kinesis.endpoint_url)
    yield client
    client.close()


def test_cbor_has_blobs_as_bytes_and_timestamps_as_milliseconds(plain_kinesis, cbor_client):
    plain_kinesis.boto3.create_stream(StreamName="orders", ShardCount=1)
    entry = b"\xbf" + text("Data") + b"\x43\x00\xff\x01" + text("PartitionKey") + text("key") + b"\xff"
    body = b"\xbf" + text("StreamName") + text("orders") + text("Records") + b"\x9f" + entry + b"\xff\xff"
    status, raw = cbor_client.call("PutRecords", body)
    assert status == 200
    put = cbor.decode(raw)
    assert put["FailedRecordCount"] == 0
    assert put["Records"][0]["ShardId"] == SHARD_0

    milliseconds = b"\xc1\x1b" + struct.pack(">Q", 1_577_836_800_000)
    body = (
        b"\xbf" + text("StreamName") + text("orders") + text("ShardId") + text(SHARD_0)
        + text("ShardIteratorType") + text("AT_TIMESTAMP") + text("Timestamp") + milliseconds + b"\xff"
    )  # fmt: skip
    status, raw = cbor_client.call("GetShardIterator", body)
    iterator = cbor.decode(raw)["ShardIterator"]
    status, raw = cbor_client.call("GetRecords", cbor.encode({"ShardIterator": iterator}))
    assert status == 200
    assert text("Data") + b"\x43\x00\xff\x01" in raw
    arrival = cbor.decode(raw)["Records"][0]["ApproximateArrivalTimestamp"]
    assert text("ApproximateArrivalTimestamp") + b"\xc1\x1b" + struct.pack(">Q", arrival.milliseconds) in raw


def test_cbor_errors_are_cbor(cbor_client):
    status, raw = cbor_client.call("DescribeStream", cbor.encode({"StreamName": "nowhere"}))
    assert status == 400
    assert cbor.decode(raw)["__type"] == "ResourceNotFoundException"
    for garbage in (b"", b"\xff\xff", b"\x9f" * 100, b"{}"):
        status, raw = cbor_client.call("DescribeStream", garbage)
        assert (status, cbor.decode(raw)["__type"]) == (400, "SerializationException")


# HTTP/2


class Http2Client:
    def __init__(self, reader, writer):
        self._reader, self._writer = reader, writer
        self._h2 = h2.connection.H2Connection(h2.config.H2Configuration(header_encoding="utf-8"))
        self._h2.initiate_connection()
        self.headers, self.bodies, self.ended = {}, {}, set()

    @classmethod
    async def connect(cls, kinesis):
        context = None
        if kinesis.certificate_path is not None:
            context = ssl.create_default_context(cafile=str(kinesis.certificate_path))
            context.set_alpn_protocols(["h2"])
        reader, writer = await asyncio.open_connection("127.0.0.1", kinesis.port, ssl=context)
        if context is not None:
            assert writer.get_extra_info("ssl_object").selected_alpn_protocol() == "h2"
        return cls(reader, writer)

    def send(self, operation, body, content_type="application/x-amz-json-1.1"):
        stream_id = self._h2.get_next_available_stream_id()
        pseudo = [(":method", "POST"), (":path", "/"), (":scheme", "https"), (":authority", "localhost")]
        self._h2.send_headers(stream_id, pseudo + list(headers_of(operation, content_type).items()))
        frame_bytes = self._h2.max_outbound_frame_size
        for start in range(0, len(body), frame_bytes):
            self._h2.send_data(stream_id, body[start : start + frame_bytes])
        self._h2.end_stream(stream_id)
        self._writer.write(self._h2.data_to_send())
        self.bodies[stream_id] = b""
        return stream_id

    async def receive(self):
        for event in self._h2.receive_data(await self._reader.read(1 << 16)):
            if isinstance(event, h2.events.ResponseReceived):
                self.headers[event.stream_id] = dict(event.headers)
            elif isinstance(event, h2.events.DataReceived):
                self.bodies[event.stream_id] += event.data
                self._h2.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
            elif isinstance(event, h2.events.StreamEnded):
                self.ended.add(event.stream_id)
        self._writer.write(self._h2.data_to_send())

    async def call(self, operation, **members):
        stream_id = self.send(operation, json.dumps(members).encode())
        while stream_id not in self.ended:
            await self.receive()
        assert self.headers[stream_id][":status"] == "200", self.bodies[stream_id]
        return json.loads(self.bodies[stream_id] or b"{}")

    async def close(self):
        self._writer.close()
        await self._writer.wait_closed()


async def subscribed(client, encode, content_type):
    """A stream with a consumer, and a subscription to its one shard."""
    stream = await client.call("DescribeStreamSummary", StreamName="orders")
    consumer = await client.call(
        "RegisterStreamConsumer", StreamARN=stream["StreamDescriptionSummary"]["StreamARN"], ConsumerName="reader"
    )
    request = {
        "ConsumerARN": consumer["Consumer"]["ConsumerARN"],
        "ShardId": SHARD_0,
        "StartingPosition": {"Type": "TRIM_HORIZON"},
    }
    return client.send("SubscribeToShard", encode(request), content_type)


@pytest.mark.parametrize("tls", [False, True])
@pytest.mark.parametrize("content_type", ["application/x-amz-json-1.1", "application/x-amz-cbor-1.1"])
def test_http2_carries_calls_and_a_subscription_on_one_connection(tls, content_type):
    is_cbor = "cbor" in content_type
    encode = cbor.encode if is_cbor else lambda value: json.dumps(value).encode()
    decode = cbor.decode if is_cbor else json.loads

    async def main():
        async with LocalKinesis(create={"orders": 1}, tls=tls) as kinesis:
            client = await Http2Client.connect(kinesis)
            subscription = await subscribed(client, encode, content_type)
            decoder, messages, fed = MessageDecoder(), [], 0

            async def wait_for(count):
                nonlocal fed
                while len(messages) < count:
                    if fed == len(client.bodies[subscription]):
                        await client.receive()
                    new = client.bodies[subscription][fed:]
                    fed += len(new)
                    messages.extend(decoder.feed(new))

            await wait_for(2)
            assert messages[0].headers[":event-type"] == "initial-response"
            assert messages[1].headers == {
                ":event-type": "SubscribeToShardEvent",
                ":content-type": content_type,
                ":message-type": "event",
            }
            data = base64.b64encode(b"x" * 300_000).decode()
            await client.call("PutRecord", StreamName="orders", Data=data, PartitionKey="key")
            await wait_for(3)
            record = decode(bytes(messages[2].payload))["Records"][0]
            assert record["Data"] == (b"x" * 300_000 if is_cbor else data)
            await client.call("SplitShard", StreamName="orders", ShardToSplit=SHARD_0, NewStartingHashKey=str(1 << 127))
            while subscription not in client.ended:
                await client.receive()
            await wait_for(4)
            assert len(decode(bytes(messages[3].payload))["ChildShards"]) == 2
            assert client.headers[subscription]["content-type"] == "application/vnd.amazon.eventstream"
            await client.close()

    asyncio.run(asyncio.wait_for(main(), 20))


def test_a_subscription_sends_heartbeats_is_taken_over_and_ends():
    """With a hundredth of the time: heartbeats each 50 ms, take-over after 50 ms, the end after 3 s."""

    async def main():
        async with LocalKinesis(create={"orders": 1}, time_scale=0.01) as kinesis:
            client = await Http2Client.connect(kinesis)
            first = await subscribed(client, lambda value: json.dumps(value).encode(), "application/x-amz-json-1.1")
            decoder, messages, fed = MessageDecoder(), [], 0
            while len(messages) < 5:
                await client.receive()
                messages += decoder.feed(client.bodies[first][fed:])
                fed = len(client.bodies[first])
            beats = [json.loads(bytes(message.payload)) for message in messages[1:]]
            assert all(beat["Records"] == [] and beat["MillisBehindLatest"] == 0 for beat in beats)
            assert all(beat["ContinuationSequenceNumber"] for beat in beats)

            arn = (await client.call("DescribeStreamSummary", StreamName="orders"))["StreamDescriptionSummary"][
                "StreamARN"
            ]
            consumer = (await client.call("ListStreamConsumers", StreamARN=arn))["Consumers"][0]["ConsumerARN"]
            request = {"ConsumerARN": consumer, "ShardId": SHARD_0, "StartingPosition": {"Type": "LATEST"}}
            second = client.send("SubscribeToShard", json.dumps(request).encode())
            while first not in client.ended:
                await client.receive()
            messages += decoder.feed(client.bodies[first][fed:])
            assert messages[-1].headers[":message-type"] == "exception"
            assert messages[-1].headers[":exception-type"] == "ResourceInUseException"
            assert second not in client.ended
            while second not in client.ended:
                await client.receive()
            endings = MessageDecoder().feed(client.bodies[second])
            assert all(message.headers[":message-type"] == "event" for message in endings)
            await client.close()

    asyncio.run(asyncio.wait_for(main(), 20))
