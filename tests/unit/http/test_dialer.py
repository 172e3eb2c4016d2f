"""New connections: proxies, TLS, IPv6, what is said when they fail, and what is left when they are cancelled."""

import asyncio
import base64
import datetime as dt
import socket
from contextlib import asynccontextmanager, suppress

import pytest
from blockbuster import blockbuster_ctx

from anabranch._http.client.dialer import (
    Dialer,
    Endpoint,
    Proxy,
    client_tls_context,
    parse_endpoint,
    system_has_certificates,
)
from anabranch._http.client.http_client import HttpClient
from anabranch._http.client.limits import ClientTimeouts
from anabranch._http.client.stream_pool import StreamPool
from anabranch._http.server.exchange import Response, StreamingResponse
from anabranch._http.server.http_server import HttpServer
from anabranch.errors import ConfigurationError, TransportError
from anabranch.local.server import load_certificate, write_self_signed_certificate
from canned_server import answer, canned_server, read_request


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    return write_self_signed_certificate(tmp_path_factory.mktemp("tls"), "127.0.0.1", dt.datetime.now(dt.UTC))


def run(main):
    async def guarded():
        async with asyncio.timeout(20):
            with blockbuster_ctx("anabranch"):
                await main()

    asyncio.run(guarded())


def post(client, body=b"hello"):
    headers = b"host: here\r\ncontent-length: %d\r\n\r\n" % len(body)
    return client.post(
        "all", headers, [body], lambda response: (response.status, bytes(response.body)), repeatable=True
    )


@asynccontextmanager
async def client_through(dialer, **options):
    client = HttpClient(dialer, purposes={"all": 4}, **options)
    try:
        yield client
    finally:
        await client.close()


def connecting_proxy(seen, *, authorization=None, status=b"200 Connection established"):
    """A proxy that opens tunnels, as HTTP proxies do."""

    async def conversation(reader, writer):
        head = await reader.readuntil(b"\r\n\r\n")
        seen.append(head)
        if authorization and authorization not in head:
            writer.write(b"HTTP/1.1 407 Proxy Authentication Required\r\ncontent-length: 0\r\n\r\n")
            await reader.read()
            return
        writer.write(b"HTTP/1.1 %s\r\n\r\n" % status)
        if not status.startswith(b"200"):
            await reader.read()
            return
        host, _, port = head.split(b" ")[1].decode().rpartition(":")
        there_reader, there_writer = await asyncio.open_connection(host.strip("[]"), int(port))
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(pump(reader, there_writer))
                group.create_task(pump(there_reader, writer))
        finally:
            there_writer.transport.abort()

    return conversation


async def pump(reader, writer):
    with suppress(ConnectionError):
        while data := await reader.read(65_536):
            writer.write(data)
            await writer.drain()
    writer.transport.abort()


@asynccontextmanager
async def secure_server(certificate):
    def handler(request):
        if request.body == b"stream":

            async def chunks():
                yield b"pushed over " + request.http_version.encode()

            return StreamingResponse(200, chunks())
        return Response(200, bytes(request.body))

    tls = await asyncio.to_thread(load_certificate, *certificate)
    async with HttpServer(handler, tls=tls) as server:
        yield server, parse_endpoint(server.url)


def test_a_proxy_tunnels_tls_with_its_password_and_http2_inside(certificate):
    async def main():
        seen = []
        login = "Basic " + base64.b64encode(b"me:secret").decode()
        context = await asyncio.to_thread(client_tls_context, str(certificate[0]), ("h2", "http/1.1"))
        plain = await asyncio.to_thread(client_tls_context, str(certificate[0]))
        async with (
            secure_server(certificate) as (server, endpoint),
            canned_server(connecting_proxy(seen, authorization=login.encode())) as proxy_server,
        ):
            proxy = Proxy("127.0.0.1", proxy_server.port, tls=False, authorization=login)
            async with client_through(Dialer(endpoint, tls=plain, proxy=proxy)) as client:
                assert await post(client) == (200, b"hello")
                assert await post(client) == (200, b"hello")
            assert len(seen) == 1
            assert seen[0].startswith(b"CONNECT 127.0.0.1:%d HTTP/1.1\r\nhost: 127.0.0.1:" % server.port)
            streams = StreamPool(Dialer(endpoint, tls=context, proxy=proxy))
            stream = await streams.open([("host", "x")], b"stream")
            assert b"".join(await stream.receive()) == b"pushed over 2"
            await streams.close()
            denied = Proxy("127.0.0.1", proxy_server.port, tls=False)
            async with client_through(Dialer(endpoint, tls=plain, proxy=denied)) as client:
                with pytest.raises(TransportError, match="needs a user and a password") as failure:
                    await post(client)
                assert not failure.value.maybe_sent
            await proxy_server.all_gone()

    run(main)


def test_a_proxy_may_be_reached_over_tls_itself(certificate):
    async def main():
        seen = []
        proxy_tls = await asyncio.to_thread(load_certificate, *certificate)
        context = await asyncio.to_thread(client_tls_context, str(certificate[0]))
        async with (
            secure_server(certificate) as (_, endpoint),
            canned_server(connecting_proxy(seen), proxy_tls) as proxy_server,
        ):
            proxy = Proxy("127.0.0.1", proxy_server.port, tls=True)
            dialer = Dialer(endpoint, tls=context, proxy=proxy, proxy_tls=context)
            async with client_through(dialer) as client:
                assert await post(client, b"x" * 200_000) == (200, b"x" * 200_000)

    run(main)


@pytest.mark.parametrize(
    "status, words", [(b"403 Forbidden", "CONNECT with status 403"), (b"2xx what", "not HTTP/1.1")]
)
def test_a_proxy_that_refuses_says_why(certificate, status, words):
    async def main():
        context = await asyncio.to_thread(client_tls_context, str(certificate[0]))
        async with canned_server(connecting_proxy([], status=status)) as proxy_server:
            proxy = Proxy("127.0.0.1", proxy_server.port, tls=False)
            endpoint = parse_endpoint("https://kinesis.eu-west-1.amazonaws.com")
            async with client_through(Dialer(endpoint, tls=context, proxy=proxy)) as client:
                with pytest.raises(TransportError, match=words):
                    await post(client)
            await proxy_server.all_gone()

    run(main)


def test_a_proxy_in_clear_text_gets_the_whole_url_and_its_password():
    async def main():
        seen = []

        async def conversation(reader, writer):
            while True:
                seen.append(await read_request(reader))
                writer.write(answer(b"through"))

        async with canned_server(conversation) as proxy_server:
            proxy = Proxy("127.0.0.1", proxy_server.port, tls=False, authorization="Basic eDp5")
            async with client_through(Dialer(parse_endpoint("http://kinesis.example:4567"), proxy=proxy)) as client:
                assert await post(client) == (200, b"through")
        assert seen[0].startswith(b"POST http://kinesis.example:4567/ HTTP/1.1\r\nproxy-authorization: Basic eDp5\r\n")

    run(main)


def test_ipv6_is_spoken():
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        pytest.skip("this machine has no IPv6")

    async def main():
        async with HttpServer(lambda request: Response(200, request.headers["host"].encode()), host="::1") as server:
            endpoint = Endpoint("http", "::1", server.port)
            async with client_through(Dialer(endpoint)) as client:
                headers = b"host: %s\r\ncontent-length: 0\r\n\r\n" % endpoint.host_header.encode()
                seen = await client.post("all", headers, [], lambda response: bytes(response.body), repeatable=True)
                assert seen == b"[::1]:%d" % server.port

    run(main)


def test_tls_on_a_port_without_it_and_a_server_that_never_answers_are_named(certificate):
    async def main():
        context = await asyncio.to_thread(client_tls_context, str(certificate[0]))

        async def clear(reader, writer):
            await reader.read(10)
            writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
            await reader.read()

        async def silent(reader, writer):
            await reader.read(-1)

        for conversation, seconds, words in (
            (clear, 10.0, "this port speaks TLS"),
            (silent, 0.2, r"no connection to .* within 0\.2 s"),
        ):
            async with canned_server(conversation) as server:
                dialer = Dialer(Endpoint("https", "127.0.0.1", server.port), tls=context, connect_timeout=seconds)
                async with client_through(dialer) as client:
                    with pytest.raises(TransportError, match=words) as failure:
                        await post(client)
                    assert not failure.value.maybe_sent
                await server.all_gone()

    run(main)


def test_a_cancelled_connection_attempt_leaves_nothing_open_and_frees_its_place(certificate):
    async def main():
        context = await asyncio.to_thread(client_tls_context, str(certificate[0]))
        arrived = asyncio.Event()

        async def silent(reader, writer):
            arrived.set()
            await reader.read(-1)

        async with canned_server(silent) as server:
            dialer = Dialer(Endpoint("https", "127.0.0.1", server.port), tls=context)
            client = HttpClient(dialer, purposes={"all": 1}, timeouts=ClientTimeouts(total=5))
            call = asyncio.ensure_future(post(client))
            await arrived.wait()
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call
            await server.all_gone()
            assert client._pools["all"]._free_turns == 1
            await client.close()

    run(main)


def test_a_client_closed_while_it_dials_keeps_no_connection():
    async def main():
        async def echo(reader, writer):
            await reader.read()

        async with canned_server(echo) as server:
            client = HttpClient(Dialer(parse_endpoint(server.url)), purposes={"all": 1})
            call = asyncio.ensure_future(post(client))
            await asyncio.sleep(0)
            await client.close()
            with pytest.raises(TransportError, match="closed"):
                await call
            await server.all_gone()

    run(main)


def test_a_certificate_bundle_that_cannot_be_read_is_a_setting_that_is_wrong(tmp_path):
    with pytest.raises(ConfigurationError, match="AWS_CA_BUNDLE"):
        client_tls_context(str(tmp_path / "none.pem"))
    (tmp_path / "empty.pem").write_text("nothing")
    with pytest.raises(ConfigurationError, match="AWS_CA_BUNDLE"):
        client_tls_context(str(tmp_path / "empty.pem"))
    assert client_tls_context(str(tmp_path)).verify_mode.name == "CERT_REQUIRED"
    assert isinstance(system_has_certificates(), bool)
