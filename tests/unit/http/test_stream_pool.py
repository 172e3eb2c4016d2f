"""Streamed answers, over both versions of HTTP: order, back-pressure, ends, breaks and cancellation."""

import asyncio
import datetime as dt
from contextlib import asynccontextmanager

import pytest
from blockbuster import blockbuster_ctx

from anabranch._http.client.connection import ClientResponse
from anabranch._http.client.dialer import Dialer, client_tls_context, parse_endpoint
from anabranch._http.client.limits import ClientTimeouts
from anabranch._http.client.stream_pool import StreamPool
from anabranch._http.server.exchange import ServerLimits, StreamingResponse
from anabranch._http.server.http_server import HttpServer
from anabranch.errors import TransportError, UsageError
from anabranch.local.server import load_certificate, write_self_signed_certificate
from canned_server import canned_server, read_request
from http2_dialer import Http2Dialer
from network_proxy import NetworkProxy

HEADERS = [("host", "here"), ("x-test", "1")]


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    return write_self_signed_certificate(tmp_path_factory.mktemp("tls"), "127.0.0.1", dt.datetime.now(dt.UTC))


def run(main):
    async def guarded():
        async with asyncio.timeout(30):
            with blockbuster_ctx("anabranch"):
                await main()

    asyncio.run(guarded())


def dialer_of(http2):
    return Http2Dialer if http2 else Dialer


async def whole(stream):
    received = bytearray()
    while pieces := await stream.receive():
        for piece in pieces:
            received += piece
    return bytes(received)


@asynccontextmanager
async def canned_client(conversation, http2=False, **options):
    async with canned_server(conversation) as server:
        client = StreamPool(dialer_of(http2)(parse_endpoint(server.url)), **options)
        try:
            yield server, client
        finally:
            await client.close()
            await server.all_gone()


@asynccontextmanager
async def served_client(handler, certificate=None, http2=True, **options):
    """Our own server, which speaks both versions."""
    tls = context = None
    if certificate is not None:
        tls = await asyncio.to_thread(load_certificate, *certificate)
        alpn = ("h2", "http/1.1") if http2 else ("http/1.1",)
        context = await asyncio.to_thread(client_tls_context, str(certificate[0]), alpn)
    async with HttpServer(handler, tls=tls) as server:
        client = StreamPool(dialer_of(http2)(parse_endpoint(server.url), tls=context), **options)
        try:
            yield server, client
        finally:
            await client.close()


def streaming(*chunks, closed=None):
    """A handler that pushes these chunks, then waits for ever where the last one is None."""

    async def push():
        try:
            for chunk in chunks:
                if chunk is None:
                    await asyncio.Event().wait()
                yield chunk
        finally:
            if closed is not None:
                closed.set()

    return lambda request: StreamingResponse(200, push(), [("x-version", request.http_version)])


VERSIONS = pytest.mark.parametrize(
    "secure, http2, version",
    [(False, True, b"2"), (False, False, b"1.1"), (True, True, b"2"), (True, False, b"1.1")],
)


@VERSIONS
def test_a_stream_is_read_to_its_end_in_order(certificate, secure, http2, version):
    async def main():
        chunks = [bytes([n % 256]) * (n * 37 % 70_000 + 1) for n in range(100)]
        async with served_client(streaming(*chunks), certificate if secure else None, http2) as (_, client):
            stream = await client.open(HEADERS, b"body")
            assert stream.headers[b"x-version"] == version
            assert await whole(stream) == b"".join(chunks)
            assert await stream.receive() == []
            stream.close()

    run(main)


@VERSIONS
def test_closing_a_stream_ends_it_at_the_server_at_once(certificate, secure, http2, version):
    async def main():
        closed = asyncio.Event()
        handler = streaming(b"first", None, closed=closed)
        async with served_client(handler, certificate if secure else None, http2) as (_, client):
            stream = await client.open(HEADERS, b"body")
            assert b"".join(await stream.receive()) == b"first"
            stream.close()
            await closed.wait()
            with pytest.raises(TransportError, match="closed by this client"):
                await stream.receive()

    run(main)


@pytest.mark.parametrize("http2", [True, False])
def test_a_stream_that_is_opened_while_the_client_closes_fails_and_leaves_nothing_open(http2):
    async def main():
        for turns in range(1, 40):  # close the client at any moment between connecting and the accepted stream
            async with served_client(streaming(None), http2=http2) as (_, client):
                opening = asyncio.ensure_future(client.open(HEADERS, b"{}"))
                for _ in range(turns):
                    await asyncio.sleep(0)
                is_opening = not opening.done()
                await client.close()
                if is_opening:
                    with pytest.raises(TransportError, match="closed"):
                        await opening
                assert not client._connections
                assert client._sweep is None

    run(main)


@VERSIONS
def test_a_cancelled_reader_and_a_closed_client_leave_nothing_open(certificate, secure, http2, version):
    async def main():
        closed = asyncio.Event()
        handler = streaming(None, closed=closed)
        async with served_client(handler, certificate if secure else None, http2) as (_, client):
            stream = await client.open(HEADERS, b"body")
            reader = asyncio.ensure_future(stream.receive())
            await asyncio.sleep(0)
            reader.cancel()
            with pytest.raises(asyncio.CancelledError):
                await reader
            await client.close()
            await closed.wait()
            with pytest.raises(UsageError):
                await client.open(HEADERS, b"body")

    run(main)


@VERSIONS
def test_a_refusal_is_read_whole(certificate, secure, http2, version):
    async def main():
        from anabranch._http.server import exchange

        def refuse(request):
            return exchange.Response(400, b"x" * 100_000, [("x-amzn-requestid", "id-1")])

        async with served_client(refuse, certificate if secure else None, http2) as (_, client):
            refusal = await client.open(HEADERS, b"body")
            assert isinstance(refusal, ClientResponse)
            assert (refusal.status, len(refusal.body)) == (400, 100_000)
            assert refusal.headers[b"x-amzn-requestid"] == b"id-1"

    run(main)


@VERSIONS
def test_a_reader_that_does_not_come_back_stops_the_server_not_its_neighbours(certificate, secure, http2, version):
    async def main():
        pushed = {}

        def handler(request):
            name = bytes(request.body)

            async def push():
                for _ in range(400):
                    pushed[name] = pushed.get(name, 0) + 65_536
                    yield b"x" * 65_536

            return StreamingResponse(200, push())

        async with served_client(handler, certificate if secure else None, http2) as (_, client):
            slow = await client.open(HEADERS, b"slow")
            await slow.receive()
            quick = await client.open(HEADERS, b"quick")
            assert len(await whole(quick)) == 400 * 65_536
            assert pushed[b"slow"] < 20 << 20  # what windows, kernel and TLS hold, not the 26 MB of the stream
            slow.close()
            quick.close()

    run(main)


def test_streams_share_one_http2_connection_up_to_its_limit():
    async def main():
        handler = streaming(b"x", None)
        async with served_client(handler) as (_, client):
            streams = await asyncio.gather(*(client.open(HEADERS, b"body") for _ in range(110)))
            assert [connection.stream_count for connection in client._connections] == [100, 10]
            for stream in streams:
                stream.close()
            assert [connection.stream_count for connection in client._connections] == [0, 0]
            again = await client.open(HEADERS, b"body")
            assert len(client._connections) == 2
            again.close()

    run(main)


def test_streams_that_are_opened_at_once_wait_for_what_the_server_allows():
    """AWS allows a few per connection, and says so in its first frame, which takes a while to come."""

    async def main():
        async with HttpServer(streaming(None), limits=ServerLimits(streams_max=16)) as server:
            proxy = await NetworkProxy(server.port).start()
            client = StreamPool(Http2Dialer(parse_endpoint(f"http://127.0.0.1:{proxy.port}")))
            proxy.cut()
            opening = asyncio.gather(*(client.open(HEADERS, b"body") for _ in range(64)))
            asyncio.get_running_loop().call_later(0.1, lambda: proxy.heal(drop=False))
            for stream in await opening:
                stream.close()
            assert len(client._connections) == 4
            await client.close()
            await proxy.close()

    run(main)


def test_there_are_no_more_streams_than_allowed():
    async def main():
        async with served_client(streaming(None), streams_max=2) as (_, client):
            streams = [await client.open(HEADERS, b"body") for _ in range(2)]
            with pytest.raises(TransportError, match="2 streams are already open") as failure:
                await client.open(HEADERS, b"body")
            assert not failure.value.maybe_sent
            streams[0].close()
            (await client.open(HEADERS, b"body")).close()

    run(main)


@pytest.mark.parametrize("http2", [True, False])
def test_a_silent_stream_and_a_silent_server_are_given_up(http2):
    async def main():
        async with served_client(streaming(b"x", None), http2=http2, timeouts=ClientTimeouts(message=0.2)) as (
            _,
            client,
        ):
            stream = await client.open(HEADERS, b"body")
            await stream.receive()
            with pytest.raises(TransportError, match=r"sent nothing for 0\.2 s inside a stream"):
                await stream.receive()
            stream.close()
            assert not any(connection.usable for connection in client._connections)  # it may be dead

        async def silent(reader, writer):
            await reader.read()

        async with canned_client(silent, http2, timeouts=ClientTimeouts(total=0.4)) as (_, client):
            with pytest.raises(TransportError):
                await client.open(HEADERS, b"body")

    run(main)


@pytest.mark.parametrize("http2", [True, False])
def test_a_connection_lost_in_the_middle_breaks_its_streams(http2):
    async def main():
        from anabranch._http.server.exchange import HangUp

        async def push():
            yield b"half"
            raise HangUp

        async with served_client(lambda request: StreamingResponse(200, push()), http2=http2) as (_, client):
            stream = await client.open(HEADERS, b"body")
            with pytest.raises(TransportError):
                await whole(stream)
            stream.close()

    run(main)


def says(*parts):
    async def conversation(reader, writer):
        await read_request(reader)
        for part in parts:
            writer.write(part)
            await writer.drain()
        writer.write_eof()
        await reader.read()

    return conversation


OK = b"HTTP/1.1 200 OK\r\n"


@pytest.mark.parametrize(
    "parts, body",
    [
        ((OK + b"\r\n", b"until ", b"close"), b"until close"),
        ((OK + b"content-length: 5\r\n\r\nab", b"cde"), b"abcde"),
        ((OK + b"content-length: 0\r\n\r\n",), b""),
        ((OK + b"transfer-encoding: chunked\r\n\r\n2", b"\r", b"\nab\r", b"\n1\r\nc\r\n0\r\n", b"\r\n"), b"abc"),
        ((b"HTTP/1.1 100 Continue\r\n\r\n", OK + b"content-length: 1\r\n\r\na"), b"a"),
    ],
)
def test_every_framing_of_http1_is_streamed(parts, body):
    async def main():
        async with canned_client(says(*parts)) as (_, client):
            stream = await client.open(HEADERS, b"body")
            assert await whole(stream) == body
            stream.close()

    run(main)


@pytest.mark.parametrize(
    "parts",
    [
        (OK + b"content-length: 5\r\n\r\nab",),
        (OK + b"transfer-encoding: chunked\r\n\r\n5\r\nab",),
        (OK + b"transfer-encoding: chunked\r\n\r\nzz\r\n",),
    ],
)
def test_a_stream_that_breaks_off_is_an_error(parts):
    async def main():
        async with canned_client(says(*parts)) as (_, client):
            stream = await client.open(HEADERS, b"body")
            with pytest.raises(TransportError):
                await whole(stream)
            stream.close()

    run(main)


@pytest.mark.parametrize(
    "parts, words",
    [
        ((b"HTTP/1.1 101 Switching Protocols\r\n\r\n",), "unexpected status 101"),
        ((b"HTTP/1.1 100 Continue\r\n\r\n" * 9,), "unexpected status 100"),
        ((OK + b"x: " + b"a" * 90_000,), "too long"),
        ((b"nonsense\r\n\r\n",), "not HTTP/1.1"),
        ((OK,), "closed the connection"),
    ],
)
def test_a_broken_head_of_a_stream_is_an_error_that_says_what_is_wrong(parts, words):
    async def main():
        async with canned_client(says(*parts)) as (_, client):
            with pytest.raises(TransportError, match=words):
                await client.open(HEADERS, b"body")

    run(main)


def test_a_self_signed_certificate_is_refused_with_advice(certificate):
    async def main():
        tls = await asyncio.to_thread(load_certificate, *certificate)
        untrusting = await asyncio.to_thread(client_tls_context)
        async with HttpServer(streaming(b"x"), tls=tls) as server:
            client = StreamPool(Dialer(parse_endpoint(server.url), tls=untrusting))
            with pytest.raises(TransportError, match=r"not trusted.*AWS_CA_BUNDLE") as failure:
                await client.open(HEADERS, b"body")
            assert not failure.value.maybe_sent
            await client.close()

    run(main)
