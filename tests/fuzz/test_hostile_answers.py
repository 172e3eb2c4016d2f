"""A server that answers with anything: our errors within the deadline, never a hang, a crash or endless memory."""

import asyncio
import base64
import json
import tracemalloc
from contextlib import asynccontextmanager

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from anabranch._aws.account import ServiceAddress
from anabranch._aws.credentials import CredentialSource
from anabranch._aws.kinesis_client import KINESIS, KinesisClient
from anabranch._aws.service import AwsService
from anabranch._daemon_threads import DaemonThreads
from anabranch._http.client import connection
from anabranch._http.client.dialer import Dialer, parse_endpoint
from anabranch._http.client.http_client import HttpClient
from anabranch._http.client.limits import ClientTimeouts
from anabranch._http.client.stream_pool import StreamPool
from anabranch._model.streams import TRIM_HORIZON, parse_stream
from anabranch._wire.event_stream import encode_message
from anabranch._wire.messages import PutRecordsEntry
from anabranch.errors import ServiceError, TransportError
from canned_server import answer, canned_server, read_request
from http2_dialer import Http2Dialer
from subscribed import subscribed

ORDERS = parse_stream("orders")
TIMEOUTS = ClientTimeouts(connect=2, read=0.3, message=0.6, total=0.6)
EXPECTED = (ServiceError, TransportError)

FUZZ = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@pytest.fixture(scope="module", autouse=True)
def small_bodies():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(connection, "BODY_BYTES_MAX", 4 << 20)
        yield


class Keys:
    access_key, secret_key, token = "AKID", "secret", None


@asynccontextmanager
async def client_of(conversation, *, dialer_type=Dialer):
    async with canned_server(conversation) as server:
        endpoint = parse_endpoint(server.url)
        dialer = dialer_type(endpoint, connect_timeout=TIMEOUTS.connect)
        thread = DaemonThreads(1, "credentials")
        source = CredentialSource(lambda anew: Keys(), thread)
        http = HttpClient(dialer, purposes={"reads": 4, "writes": 4, "others": 4}, timeouts=TIMEOUTS)
        service = AwsService(KINESIS, ServiceAddress("eu-west-1", endpoint), source, http)
        streams = StreamPool(dialer, timeouts=TIMEOUTS)
        try:
            async with KinesisClient(service, streams) as client:
                yield client
            await server.all_gone()
        finally:
            thread.shutdown()


def says(raw, *, hang_up=True):
    async def conversation(reader, writer):
        await read_request(reader)
        writer.write(raw)
        await writer.drain()
        if hang_up:
            writer.write_eof()
        await reader.read()

    return conversation


async def outcome(awaitable):
    """The error, or the value: both are fine, as long as there is one in time."""
    async with asyncio.timeout(10):
        try:
            return await awaitable
        except EXPECTED as error:
            return error


async def all_events(client):
    async with subscribed(client, "arn", "shardId-0", TRIM_HORIZON) as events:
        return [event async for event in events]


def meet(raw, *, hang_up=True):
    """Every kind of call against this answer."""

    async def main():
        async with client_of(says(raw, hang_up=hang_up)) as client:
            return [
                await outcome(client.get_records(ORDERS, "iterator")),
                await outcome(client.put_records(ORDERS, [PutRecordsEntry(b"x", "k")])),
                await outcome(client.list_shards(ORDERS)),
                await outcome(client.describe_stream_summary(ORDERS)),
                await outcome(all_events(client)),
            ]

    return asyncio.run(main())


@FUZZ
@given(st.binary(max_size=300))
def test_arbitrary_bytes_are_refused(raw):
    results = meet(raw)
    assert all(isinstance(result, EXPECTED) for result in results[:4])


@FUZZ
@given(st.binary(max_size=200), st.sampled_from([200, 200, 400, 403, 500, 204, 302]), st.booleans())
def test_arbitrary_bodies_are_refused(body, status, chunked):
    framing = (
        b"transfer-encoding: chunked\r\n\r\n%x\r\n%s\r\n0\r\n\r\n" % (len(body), body) if body and chunked else None
    )
    head = b"HTTP/1.1 %d X\r\n" % status
    results = meet(head + (framing or b"content-length: %d\r\n\r\n%s" % (len(body), body)))
    assert all(isinstance(result, EXPECTED) for result in results[:4])


RECORDS = {
    "Records": [
        {"SequenceNumber": "1", "Data": "eA==", "PartitionKey": "k", "ApproximateArrivalTimestamp": 1.7e9},
        {"SequenceNumber": "2", "Data": "eHg=", "PartitionKey": "k"},
    ],
    "NextShardIterator": "next",
    "MillisBehindLatest": 0,
}
GOOD = answer(json.dumps(RECORDS).encode(), headers=b"date: Mon, 16 Nov 2026 10:00:00 GMT\r\n")


@FUZZ
@given(st.data())
def test_a_good_answer_with_bytes_changed_or_cut_is_read_or_refused(data):
    raw = bytearray(GOOD)
    for _ in range(data.draw(st.integers(1, 4))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    meet(bytes(raw[: data.draw(st.integers(0, len(raw)))]))


@pytest.mark.parametrize("cut", range(0, len(GOOD), 23))
def test_an_answer_that_breaks_off_anywhere_is_a_transport_error(cut):
    async def main():
        async with client_of(says(GOOD[:cut])) as client:
            with pytest.raises(TransportError):
                await client.get_records(ORDERS, "iterator")

    asyncio.run(main())


def hostile_bodies():
    record = '{"SequenceNumber":"1","Data":"%s","PartitionKey":"k"}'
    yield "data that is no base64", '{"Records":[%s]}' % (record % "####")
    yield "base64 of the wrong length", '{"Records":[%s]}' % (record % "abc")
    yield "base64 with a line end", '{"Records":[%s]}' % (record % "eHh4\\n")
    yield "large data that is no base64", '{"Records":[%s]}' % (record % ("#" * 60_000))
    yield "arrays without end", "[" * 200_000
    yield "objects inside objects", '{"Records":' * 50_000
    yield "deep nesting in a member that nobody knows", '{"X":' + "[" * 20_000 + "]" * 20_000 + "}"
    yield "a number beyond all bounds", '{"Records":[],"MillisBehindLatest":%s}' % ("9" * 100_000)
    yield "another type for every member", '{"Records":{},"NextShardIterator":1,"MillisBehindLatest":"x"}'
    yield "a lone surrogate", '{"Records":[],"NextShardIterator":"\\ud800"}'
    yield "null instead of records", '{"Records":null}'
    yield "a sequence number as a number", '{"Records":[{"SequenceNumber":1,"Data":"","PartitionKey":"k"}]}'


@pytest.mark.parametrize("body", [pytest.param(body, id=name) for name, body in hostile_bodies()])
def test_a_hostile_body_is_a_transport_error_that_names_its_call(body):
    results = meet(answer(body.encode()))
    assert isinstance(results[0], TransportError)
    assert "GetRecords" in str(results[0])


HUGE = [
    pytest.param(b"HTTP/1.1 200 OK\r\ncontent-length: 999999999999\r\n\r\n", id="a huge length"),
    pytest.param(b"HTTP/1.1 200 OK\r\ncontent-length: 4194304\r\n\r\nx", id="an allowed length that never comes"),
    pytest.param(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nffffffff\r\nx", id="a huge chunk"),
    pytest.param(b"HTTP/1.1 200 OK\r\n" + b"x: y\r\n" * 20_000, id="headers without end"),
    pytest.param(b"HTTP/1.1 200 OK\r\n\r\n" + b"x" * (6 << 20), id="a body without end"),
    pytest.param(
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n" + b"1\r\nx\r\n" * 900_000, id="tiny chunks without end"
    ),
    pytest.param(b"\r\n" * 200_000, id="empty lines without end"),
]


@pytest.mark.parametrize("raw", HUGE)
def test_sizes_without_end_cost_little_memory(raw):
    async def main():
        async with client_of(says(raw, hang_up=False)) as client:
            tracemalloc.start()
            try:
                results = [
                    await outcome(client.get_records(ORDERS, "iterator")),
                    await outcome(client.put_records(ORDERS, [PutRecordsEntry(b"x", "k")])),
                ]
                _, peak = tracemalloc.get_traced_memory()
            finally:
                tracemalloc.stop()
            assert all(isinstance(result, TransportError) for result in results)
            assert peak < 40 << 20

    asyncio.run(main())


def test_a_stream_of_chunks_that_say_nothing_ends():
    async def main():
        async def drip(reader, writer):
            await read_request(reader)
            writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
            while True:
                writer.write(b"1")
                await writer.drain()
                await asyncio.sleep(0.01)

        async with client_of(drip) as client:
            assert isinstance(await outcome(client.get_records(ORDERS, "iterator")), TransportError)
            assert isinstance(await outcome(all_events(client)), TransportError)

    asyncio.run(main())


def event(payload, **headers):
    given_headers = {
        ":message-type": "event",
        ":event-type": "SubscribeToShardEvent",
        ":content-type": "application/json",
    }
    return encode_message(given_headers | {name.replace("_", "-"): value for name, value in headers.items()}, payload)


EVENT = event(json.dumps({"Records": [], "ContinuationSequenceNumber": "1", "MillisBehindLatest": 0}).encode())


@FUZZ
@given(st.data())
def test_an_event_stream_with_bytes_changed_or_cut_is_read_or_refused(data):
    raw = bytearray(EVENT * 3)
    for _ in range(data.draw(st.integers(0, 3))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    raw = raw[: data.draw(st.integers(0, len(raw)))]

    async def main():
        head = b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(raw)
        async with client_of(says(head + bytes(raw))) as client:
            await outcome(all_events(client))

    asyncio.run(main())


@pytest.mark.parametrize(
    "body, words",
    [
        (event(b"{"), "SubscribeToShard"),
        (event(b'{"Records":[{"Data":"#"}]}'), "SubscribeToShard"),
        (encode_message({":message-type": "riddle"}, b""), "unknown type"),
        (EVENT[:-1], "middle of a message"),
        (b"\xff" * 40, "checksum"),
        (
            encode_message(
                {":message-type": "exception", ":exception-type": "ResourceInUseException"}, b'{"message":"taken"}'
            ),
            "ResourceInUseException: taken",
        ),
        (
            encode_message({":message-type": "error", ":error-code": "InternalError", ":error-message": "m"}, b""),
            "InternalError: m",
        ),
    ],
)
def test_what_is_wrong_in_a_stream_is_named(body, words):
    async def main():
        async with client_of(says(answer(body))) as client:
            with pytest.raises(EXPECTED, match=words):
                await all_events(client)

    asyncio.run(main())


@FUZZ
@given(st.binary(max_size=200))
def test_arbitrary_bytes_are_no_http2(raw):
    async def main():
        async def conversation(reader, writer):
            await reader.read(24)
            writer.write(raw)
            await writer.drain()
            writer.write_eof()
            await reader.read()

        async with client_of(conversation, dialer_type=Http2Dialer) as client:
            assert isinstance(await outcome(all_events(client)), EXPECTED)

    asyncio.run(main())


def test_large_but_legal_answers_are_read():
    payload = base64.b64encode(b"x" * 1_000_000).decode()
    body = json.dumps({"Records": [{"SequenceNumber": "1", "Data": payload, "PartitionKey": "k"}]}).encode()
    assert len(meet(answer(body))[0].records[0].data) == 1_000_000
