"""Hostile bytes at the HTTP server: whatever one client sends, the server answers the next one."""

import asyncio
import logging
from contextlib import suppress

import h2.connection
import pytest
from hypothesis import given, settings, strategies as st

from anabranch._http.server.exchange import Response, ServerLimits
from anabranch._http.server.http_server import HttpServer

REQUEST = b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 4\r\n\r\nbody"
LIMITS = ServerLimits(head_bytes_max=4_096, body_bytes_max=4_096)


def http2_request():
    client = h2.connection.H2Connection()
    client.initiate_connection()
    client.send_headers(1, [(":method", "POST"), (":path", "/"), (":scheme", "http"), (":authority", "x")])
    client.send_data(1, b"body", end_stream=True)
    client.send_headers(3, [(":method", "GET"), (":path", "/"), (":scheme", "http"), (":authority", "x")])
    client.reset_stream(3)
    client.ping(b"12345678")
    return client.data_to_send()


HTTP2 = http2_request()


@st.composite
def mutated(draw, original):
    raw = bytearray(original)
    for _ in range(draw(st.integers(0, 6))):
        place = draw(st.integers(0, len(raw)))
        action = draw(st.sampled_from(("replace", "insert", "cut", "repeat")))
        if action == "replace" and place < len(raw):
            raw[place] = draw(st.integers(0, 255))
        elif action == "insert":
            raw[place:place] = draw(st.binary(min_size=1, max_size=20))
        elif action == "cut":
            del raw[place : place + draw(st.integers(1, 40))]
        elif action == "repeat":
            raw += raw[:place]
    return bytes(raw)


hostile = st.one_of(
    st.binary(max_size=2_000),
    mutated(REQUEST),
    mutated(HTTP2),
    st.binary(max_size=200).map(lambda tail: HTTP2[:24] + tail),
    st.binary(max_size=200).map(lambda tail: HTTP2 + tail),
)


async def send(port, pieces):
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    with suppress(OSError):
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
        writer.write_eof()
        await reader.read()
    writer.close()
    with suppress(OSError):
        await writer.wait_closed()


@given(st.lists(st.lists(hostile, min_size=1, max_size=3), min_size=1, max_size=4))
@settings(max_examples=150)
def test_garbage_never_hurts_the_next_client(clients):
    async def main():
        failures = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: failures.append(context))
        async with HttpServer(lambda request: Response(200, bytes(request.body)), limits=LIMITS) as server:
            async with asyncio.timeout(20):
                await asyncio.gather(*(send(server.port, pieces) for pieces in clients))
                reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
                writer.write(REQUEST)
                assert (await reader.readuntil(b"body")).startswith(b"HTTP/1.1 200")
                writer.close()
                await writer.wait_closed()
        assert failures == []

    asyncio.run(main())


@pytest.mark.parametrize("opening", [b"", REQUEST[:30], REQUEST[:-1], HTTP2[:30], HTTP2[:-1]])
def test_many_slow_clients_do_not_keep_another_from_its_answer(opening):
    async def main():
        logging.getLogger("anabranch.http").setLevel(logging.CRITICAL)
        async with HttpServer(lambda request: Response(200, bytes(request.body)), limits=LIMITS) as server:
            slow = [await asyncio.open_connection("127.0.0.1", server.port) for _ in range(200)]
            for _, writer in slow:
                writer.write(opening)
            reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
            writer.write(REQUEST)
            async with asyncio.timeout(5):
                assert (await reader.readuntil(b"body")).startswith(b"HTTP/1.1 200")
            for _, each in [*slow, (reader, writer)]:
                each.close()

    asyncio.run(main())
