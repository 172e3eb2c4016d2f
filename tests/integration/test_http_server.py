"""The HTTP server with real sockets: HTTP/1.1 by bytes, HTTP/2 by h2, limits, streams and the stop."""

import asyncio
import logging
from contextlib import asynccontextmanager, suppress

import h2.config
import h2.connection
import h2.errors
import h2.events
import pytest

from anabranch._http.server.exchange import Abandon, HangUp, Response, ServerLimits, StreamingResponse
from anabranch._http.server.http_server import HttpServer
from anabranch.errors import ConfigurationError, UsageError
from patience import PATIENCE

REQUEST = b"POST /echo HTTP/1.1\r\nhost: x\r\ncontent-length: 4\r\n\r\nbody"


class Application:
    """Answers by path, and remembers what became of its streams."""

    def __init__(self):
        self.streams_closed = asyncio.Event()
        self.released = asyncio.Event()
        self.waiting = asyncio.Event()

    def __call__(self, request):
        return getattr(self, request.path.strip("/") or "echo")(request)

    def echo(self, request):
        return Response(200, bytes(request.body), [("x-version", request.http_version)])

    def big(self, request):
        return Response(200, b"x" * 3_000_000)

    def defect(self, request):
        raise RuntimeError("planted")

    def hang_up(self, request):
        return Abandon.HANG_UP

    def silence(self, request):
        return Abandon.SILENCE

    async def slow(self, request):
        self.waiting.set()
        await self.released.wait()
        return Response(200, b"slow")

    async def late_defect(self, request):
        raise RuntimeError("planted")

    def count(self, request):
        async def chunks():
            for number in range(3):
                yield b"%d\n" % number

        return StreamingResponse(200, chunks())

    def endless(self, request):
        async def chunks():
            try:
                yield b"first"
                await asyncio.Event().wait()
            finally:
                self.streams_closed.set()

        return StreamingResponse(200, chunks())

    def flood(self, request):
        async def chunks():
            try:
                while True:
                    yield b"x" * 60_000
            finally:
                self.streams_closed.set()

        return StreamingResponse(200, chunks())

    def cut(self, request):
        async def chunks():
            yield b"first"
            raise HangUp

        return StreamingResponse(200, chunks())

    def broken(self, request):
        async def chunks():
            yield b"first"
            raise RuntimeError("planted")

        return StreamingResponse(200, chunks())


def running(limits=None):
    """Runs an async test with a server, its application and a way to connect."""

    def decorate(test):
        def run():
            async def main():
                application = Application()
                async with asyncio.timeout(PATIENCE), HttpServer(application, limits=limits) as server:
                    await test(server, application)

            asyncio.run(main())

        run.__name__ = test.__name__
        return run

    return decorate


@asynccontextmanager
async def connected(server):
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    try:
        yield reader, writer
    finally:
        writer.close()
        with suppress(OSError):
            await writer.wait_closed()


async def read_response(reader):
    head = (await reader.readuntil(b"\r\n\r\n")).decode()
    status = int(head.split()[1])
    headers = dict(line.lower().split(": ", 1) for line in head.split("\r\n")[1:] if line)
    if headers.get("transfer-encoding") == "chunked":
        body = b""
        while size := int(await reader.readline(), 16):
            body += await reader.readexactly(size)
            await reader.readexactly(2)
        await reader.readexactly(2)
    else:
        body = await reader.readexactly(int(headers.get("content-length", 0)))
    return status, headers, body


def get(path):
    return f"GET {path} HTTP/1.1\r\nhost: x\r\n\r\n".encode()


@running()
async def test_a_connection_is_kept_and_pipelined_requests_are_answered_in_order(server, application):
    async with connected(server) as (reader, writer):
        writer.write(get("/echo") + REQUEST + get("/count") + get("/big") + REQUEST)
        answers = [await read_response(reader) for _ in range(5)]
    assert [status for status, _, _ in answers] == [200] * 5
    assert [body[:6] for _, _, body in answers] == [b"", b"body", b"0\n1\n2\n", b"xxxxxx", b"body"]


@running()
async def test_many_pipelined_requests_do_not_nest(server, application):
    async with connected(server) as (reader, writer):
        writer.write(get("/echo") * 3_000)
        for _ in range(3_000):
            assert (await read_response(reader))[0] == 200


@running()
async def test_a_request_may_arrive_byte_by_byte(server, application):
    async with connected(server) as (reader, writer):
        for byte in REQUEST:
            writer.write(bytes([byte]))
            await writer.drain()
            await asyncio.sleep(0)
        assert (await read_response(reader))[2] == b"body"


@running()
async def test_a_chunked_body_is_taken_after_100_continue(server, application):
    async with connected(server) as (reader, writer):
        writer.write(b"POST /echo HTTP/1.1\r\nhost: x\r\nexpect: 100-continue\r\ntransfer-encoding: chunked\r\n\r\n")
        assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        writer.write(b"3\r\nabc\r\n0\r\n\r\n" + REQUEST)
        assert (await read_response(reader))[2] == b"abc"
        assert (await read_response(reader))[2] == b"body"


@running()
async def test_connection_close_and_http_1_0_end_the_connection(server, application):
    for request in (
        b"GET /count HTTP/1.0\r\n\r\n",
        b"GET /echo HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n",
    ):
        async with connected(server) as (reader, writer):
            writer.write(request)
            raw = await reader.read()
            assert b"connection: close" in raw
    async with connected(server) as (reader, writer):
        writer.write(b"HEAD /echo HTTP/1.1\r\nhost: x\r\ncontent-length: 3\r\n\r\nabc" + REQUEST)
        head = await reader.readuntil(b"\r\n\r\n")
        assert b"content-length: 3" in head
        assert (await read_response(reader))[2] == b"body"


@running(ServerLimits(head_bytes_max=1_000, body_bytes_max=1_000))
async def test_what_is_too_long_is_refused_with_a_reason_and_hurts_no_other_client(server, application):
    async with connected(server) as (good_reader, good_writer):
        for raw, status in (
            (b"GET / HTTP/1.1\r\nhost: x\r\na: " + b"x" * 2_000, 431),
            (b"GET / HTTP/1.1\r\nhost: x\r\na: " + b"x" * 2_000 + b"\r\n\r\n", 431),
            (b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 1001\r\n\r\n" + b"x" * 500, 413),
            (b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\nfff\r\n", 413),
            (b"nonsense\r\n\r\n", 400),
        ):
            async with connected(server) as (reader, writer):
                writer.write(raw)
                assert (await read_response(reader))[0] == status
            good_writer.write(REQUEST)
            assert (await read_response(good_reader))[2] == b"body"


@running(ServerLimits(head_timeout=0.05, body_timeout=0.05, idle_timeout=0.05, check_interval=0.02))
async def test_slow_and_idle_clients_are_let_go(server, application):
    for raw in (b"", b"P", b"PRI * HTTP/2.0\r\n", b"POST / HTTP/1.1\r\nhost", REQUEST[:-1]):
        async with connected(server) as (reader, writer):
            writer.write(raw)
            with suppress(ConnectionResetError):
                assert await reader.read() == b""


@running(ServerLimits(connections_max=1))
async def test_one_connection_too_many_gets_an_error(server, application):
    async with connected(server) as (first_reader, first_writer):
        first_writer.write(REQUEST)
        await read_response(first_reader)
        async with connected(server) as (reader, _writer):
            assert (await read_response(reader))[0] == 503
        first_writer.write(REQUEST)
        assert (await read_response(first_reader))[0] == 200


@running()
async def test_a_handler_error_is_a_500_and_the_connection_stays_open(server, application):
    logging.getLogger("anabranch.http").disabled = True
    try:
        async with connected(server) as (reader, writer):
            writer.write(get("/defect") + get("/late_defect") + REQUEST)
            assert [(await read_response(reader))[0] for _ in range(3)] == [500, 500, 200]
            writer.write(get("/broken"))
            with suppress(ConnectionResetError):
                assert (await reader.read()).endswith(b"first\r\n")
    finally:
        logging.getLogger("anabranch.http").disabled = False


@running()
async def test_an_answer_can_be_withheld_in_three_ways(server, application):
    for path, told in (("/hang_up", b""), ("/cut", b"first\r\n")):
        async with connected(server) as (reader, writer):
            writer.write(get(path))
            with suppress(ConnectionResetError):
                assert (await reader.read()).endswith(told)
    async with connected(server) as (reader, writer):
        writer.write(get("/silence") + REQUEST)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(reader.read(1), 0.1)


@running()
async def test_a_stream_ends_when_its_client_leaves(server, application):
    async with connected(server) as (reader, writer):
        writer.write(get("/endless"))
        await reader.readuntil(b"first\r\n")
    await application.streams_closed.wait()


@running()
async def test_a_client_that_leaves_a_source_without_pauses_leaves_a_server_that_answers(server, application):
    for open_stream in (lambda _: get("/flood"), lambda streams: Http2Client(*streams).request("/flood") and b""):
        application.streams_closed.clear()
        async with connected(server) as streams:
            reader, writer = streams
            writer.write(open_stream(streams))
            await reader.readexactly(1_000)
            writer.transport.abort()
        await application.streams_closed.wait()
    async with connected(server) as (reader, writer):
        writer.write(REQUEST)
        assert (await read_response(reader))[2] == b"body"


@running(ServerLimits(write_timeout=0.05, check_interval=0.02))
async def test_a_client_that_never_reads_is_let_go(server, application):
    async with connected(server) as (_, writer):
        writer.write(get("/flood"))
        await application.streams_closed.wait()


def test_a_stop_lets_answers_finish_and_ends_streams_cleanly():
    async def main():
        application = Application()
        server = HttpServer(application)
        await server.start()
        async with connected(server) as (reader, writer), connected(server) as (stream_reader, stream_writer):
            writer.write(get("/slow"))
            stream_writer.write(get("/endless"))
            await stream_reader.readuntil(b"first\r\n")
            await application.waiting.wait()
            stopping = asyncio.get_running_loop().create_task(server.stop(grace=10))
            assert await stream_reader.read() == b"0\r\n\r\n"
            await application.streams_closed.wait()
            application.released.set()
            assert (await read_response(reader))[2] == b"slow"
            await stopping
        with pytest.raises(UsageError, match="not running"):
            _ = server.port

    asyncio.run(asyncio.wait_for(main(), PATIENCE))


def test_a_stop_cuts_what_does_not_finish():
    async def main():
        application = Application()
        server = HttpServer(application)
        await server.start()
        async with connected(server) as (reader, writer):
            writer.write(get("/slow"))
            await application.waiting.wait()
            await server.stop(grace=0.05)
            with suppress(ConnectionResetError):
                assert await reader.read() == b""

    asyncio.run(asyncio.wait_for(main(), PATIENCE))


def test_a_port_in_use_is_named():
    async def main():
        async with HttpServer(Application()) as server:
            with pytest.raises(ConfigurationError, match=f"port {server.port} on 127.0.0.1 is in use"):
                await HttpServer(Application(), port=server.port).start()

    asyncio.run(main())


class Http2Client:
    """Just enough of a client: requests out, whole answers in."""

    def __init__(self, reader, writer):
        self.reader, self.writer = reader, writer
        self.h2 = h2.connection.H2Connection(h2.config.H2Configuration(header_encoding="utf-8"))
        self.h2.initiate_connection()
        self.bodies, self.statuses, self.ended, self.reset, self.terminated = {}, {}, set(), {}, False

    def request(self, path, body=b"", *, end=True):
        stream_id = self.h2.get_next_available_stream_id()
        self.h2.send_headers(
            stream_id, [(":method", "POST"), (":path", path), (":scheme", "http"), (":authority", "x"), ("cookie", "a")]
        )
        while body:
            room = min(self.h2.local_flow_control_window(stream_id), self.h2.max_outbound_frame_size)
            self.h2.send_data(stream_id, body[:room])
            body = body[room:]
        if end:
            self.h2.end_stream(stream_id)
        self.flush()
        return stream_id

    def flush(self):
        self.writer.write(self.h2.data_to_send())

    async def receive(self, *, acknowledge=True):
        data = await self.reader.read(1 << 20)
        if not data:
            raise EOFError
        for event in self.h2.receive_data(data):
            if isinstance(event, h2.events.ResponseReceived):
                self.statuses[event.stream_id] = int(dict(event.headers)[":status"])
            elif isinstance(event, h2.events.DataReceived):
                self.bodies[event.stream_id] = self.bodies.get(event.stream_id, b"") + event.data
                if acknowledge:
                    self.h2.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
            elif isinstance(event, h2.events.StreamEnded):
                self.ended.add(event.stream_id)
            elif isinstance(event, h2.events.StreamReset):
                self.reset[event.stream_id] = event.error_code
            elif isinstance(event, h2.events.ConnectionTerminated):
                self.terminated = True
        self.flush()

    async def receive_for_ever(self):
        while True:
            await self.receive()

    async def answer(self, stream_id):
        while stream_id not in self.ended:
            await self.receive()
        return self.statuses[stream_id], self.bodies.get(stream_id, b"")


@running()
async def test_http2_by_prior_knowledge_carries_many_requests_at_once(server, application):
    async with connected(server) as streams:
        client = Http2Client(*streams)
        wanted = [client.request(path, b"body") for path in ("/big", "/count", "/echo", "/slow", "/echo")]
        assert await client.answer(wanted[4]) == (200, b"body")
        assert await client.answer(wanted[1]) == (200, b"0\n1\n2\n")
        assert await client.answer(wanted[0]) == (200, b"x" * 3_000_000)


@running(ServerLimits(body_bytes_max=1_000))
async def test_http2_refuses_a_body_that_is_too_long_and_stays_open(server, application):
    async with connected(server) as streams:
        client = Http2Client(*streams)
        assert (await client.answer(client.request("/echo", b"x" * 2_000, end=False)))[0] == 413
        assert await client.answer(client.request("/echo", b"body")) == (200, b"body")


@running()
async def test_http2_streams_end_when_the_client_resets_them_or_leaves(server, application):
    async with connected(server) as streams:
        client = Http2Client(*streams)
        stream_id = client.request("/endless")
        while client.bodies.get(stream_id) != b"first":
            await client.receive()
        client.h2.reset_stream(stream_id, h2.errors.ErrorCodes.CANCEL)
        client.flush()
        await application.streams_closed.wait()
        application.streams_closed.clear()
        stream_id = client.request("/endless")
        while client.bodies.get(stream_id) != b"first":
            await client.receive()
    await application.streams_closed.wait()


@running()
async def test_http2_waits_for_the_clients_windows(server, application):
    async with connected(server) as streams:
        client = Http2Client(*streams)
        stream_id = client.request("/flood")
        while len(client.bodies.get(stream_id, b"")) < 65_535:
            await client.receive(acknowledge=False)
        assert len(client.bodies[stream_id]) == 65_535
        assert await client.answer(client.request("/echo")) == (200, b"")
        assert not application.streams_closed.is_set()


@running(ServerLimits(write_timeout=0.05, body_timeout=0.05, idle_timeout=0.05, check_interval=0.02))
async def test_http2_lets_go_of_clients_that_do_not_read_or_do_not_end(server, application):
    async with connected(server) as streams:
        client = Http2Client(*streams)
        flooded, unfinished = client.request("/flood"), client.request("/echo", b"x", end=False)
        while set(client.reset) != {flooded, unfinished}:
            await client.receive(acknowledge=False)
        await application.streams_closed.wait()
        with pytest.raises((EOFError, ConnectionResetError)):
            await client.receive()


@running()
async def test_http2_answers_can_be_withheld(server, application):
    logging.getLogger("anabranch.http").disabled = True
    try:
        async with connected(server) as streams:
            client = Http2Client(*streams)
            client.request("/silence")
            assert (await client.answer(client.request("/defect")))[0] == 500
            client.request("/cut")
            with pytest.raises((EOFError, ConnectionResetError)):
                await client.receive_for_ever()
    finally:
        logging.getLogger("anabranch.http").disabled = False


def test_a_stop_ends_http2_streams_and_sends_goaway():
    async def main():
        application = Application()
        server = HttpServer(application)
        await server.start()
        async with connected(server) as streams:
            client = Http2Client(*streams)
            slow, endless = client.request("/slow"), client.request("/endless")
            while client.bodies.get(endless) != b"first":
                await client.receive()
            stopping = asyncio.get_running_loop().create_task(server.stop(grace=10))
            assert await client.answer(endless) == (200, b"first")
            refused = client.request("/echo")
            while refused not in client.reset:
                await client.receive()
            application.released.set()
            assert await client.answer(slow) == (200, b"slow")
            while not client.terminated:
                await client.receive()
            await stopping

    asyncio.run(asyncio.wait_for(main(), PATIENCE))
