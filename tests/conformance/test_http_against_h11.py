"""h11 and our HTTP/1.1 parsers: what we accept it accepts, with the same meaning; what it writes we read."""

import asyncio
from contextlib import suppress

import h11
import pytest
from hypothesis import event, given, settings, strategies as st

from anabranch._http.client.response_framing import CHUNKED, ResponseChunks, parse_response_head
from anabranch._http.server.exchange import Response, StreamingResponse
from anabranch._http.server.http_server import HttpServer
from anabranch._http.server.request_framing import BadRequest, ChunkedBody, parse_request_head
from anabranch.errors import TransportError

NAMES = st.sampled_from(
    [
        "Host", "host", "Content-Length", "Transfer-Encoding", "Connection", "Expect", "Accept", "X-A", "x_b", "X A",
        " X", "X:", "", "X\t", "Cookie",
    ]
)  # fmt: skip
VALUES = st.sampled_from(
    [
        "", "x", "localhost:4567", " padded\t", "0", "5", "05", "+5", "5, 5", "chunked", "Chunked", "gzip, chunked",
        "identity", "close", "keep-alive", "100-continue", "a, b", "é",
    ]
)  # fmt: skip
REQUEST_LINES = st.sampled_from(
    ["POST / HTTP/1.1", "GET /a?b=c HTTP/1.1", "GET / HTTP/1.0", "GET  / HTTP/1.1",
     "G(T / HTTP/1.1", "GET / HTTP/1.1 ", "GET /"]
)  # fmt: skip
LINES = st.builds("{}: {}".format, NAMES, VALUES) | st.sampled_from([" folded", "no colon", "X : spaced"])


def by_h11(role, data):
    """The events that h11 makes of the bytes; raises h11.RemoteProtocolError."""
    connection = h11.Connection(role)
    connection.receive_data(data)
    events = []
    while (found := connection.next_event()) is not h11.NEED_DATA and found is not h11.PAUSED:
        events.append(found)
        if isinstance(found, h11.EndOfMessage | h11.ConnectionClosed):
            break
    return events


def joined(headers):
    found = {}
    for name, value in headers:
        found[name] = found[name] + b", " + value if name in found else value
    return {name.decode("latin-1"): value.decode("latin-1") for name, value in found.items()}


@settings(max_examples=400)
@given(REQUEST_LINES, st.lists(LINES, max_size=5), st.booleans())
def test_a_request_head_that_we_accept_means_the_same_to_h11(request_line, lines, with_host):
    head = "\r\n".join([request_line, *(["Host: x"] if with_host else []), *lines]).encode("latin-1")
    try:
        ours = parse_request_head(head)
    except BadRequest:
        event("refused")
        return
    event("accepted")
    theirs = by_h11(h11.SERVER, head + b"\r\n\r\n")[0]
    assert isinstance(theirs, h11.Request)
    assert (ours.method, ours.target, ours.http_version) == (
        theirs.method.decode(),
        theirs.target.decode("latin-1"),
        theirs.http_version.decode(),
    )
    assert {name: value.lower() for name, value in ours.headers.items()} == {
        name: value.lower() for name, value in joined(theirs.headers).items()
    }


def random_pieces(data, whole):
    cuts = sorted(data.draw(st.lists(st.integers(0, len(whole)), max_size=8)))
    return [whole[start:stop] for start, stop in zip([0, *cuts], [*cuts, len(whole)], strict=True)]


def write_by_h11(role, head, bodies):
    connection = h11.Connection(role)
    if role is h11.SERVER:
        connection.receive_data(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
        connection.next_event()
        connection.next_event()
    sent = connection.send(head)
    body = b"".join(connection.send(h11.Data(data=piece)) for piece in bodies)
    return sent[:-4], body + connection.send(h11.EndOfMessage(headers=[("x-trailer", "1")]))


CHUNKED_REQUEST = h11.Request(method="POST", target="/", headers=[("host", "x"), ("transfer-encoding", "chunked")])
BODIES = st.lists(st.binary(min_size=1, max_size=400), max_size=6)


@given(BODIES, st.data())
def test_we_read_the_chunked_requests_that_h11_writes(bodies, data):
    head, encoded = write_by_h11(h11.CLIENT, CHUNKED_REQUEST, bodies)
    assert parse_request_head(head).chunked
    body, waiting = ChunkedBody(1 << 20), b""
    for piece in random_pieces(data, encoded):
        waiting += piece
        waiting = waiting[body.feed(waiting) :]
    assert body.complete
    assert (bytes(body.body), waiting) == (b"".join(bodies), b"")


@given(BODIES, st.data())
def test_we_read_the_chunked_responses_that_h11_writes(bodies, data):
    response = h11.Response(status_code=200, reason=b"OK", headers=[("transfer-encoding", "chunked"), ("x-a", "1")])
    head, encoded = write_by_h11(h11.SERVER, response, bodies)
    parsed = parse_response_head(head)
    assert (parsed.status, parsed.length, parsed.keep_alive, parsed.headers[b"x-a"]) == (200, CHUNKED, True, b"1")
    chunks = ResponseChunks()
    found = [bytes(part) for piece in random_pieces(data, encoded) for part in chunks.feed(memoryview(piece))]
    assert chunks.complete
    assert not chunks.surplus
    assert b"".join(found) == b"".join(bodies)


def damaged(data, encoded):
    at = data.draw(st.integers(0, len(encoded) - 1))
    match data.draw(st.sampled_from(["change", "insert", "remove"])):
        case "change":
            return encoded[:at] + data.draw(st.binary(min_size=1, max_size=1)) + encoded[at + 1 :]
        case "insert":
            return encoded[:at] + data.draw(st.binary(min_size=1, max_size=3)) + encoded[at:]
        case _:
            return encoded[:at] + encoded[at + 1 :]


def body_by_h11(head, encoded):
    """None if h11 refuses the bytes, or finds them incomplete."""
    try:
        events = by_h11(h11.SERVER, head + b"\r\n\r\n" + encoded)
    except h11.RemoteProtocolError:
        return None
    if not isinstance(events[-1], h11.EndOfMessage):
        return None
    return b"".join(bytes(found.data) for found in events if isinstance(found, h11.Data))


@settings(max_examples=300)
@given(BODIES, st.data())
def test_damaged_chunks_are_never_read_as_two_different_bodies(bodies, data):
    head, encoded = write_by_h11(h11.CLIENT, CHUNKED_REQUEST, bodies)
    encoded = damaged(data, encoded)
    theirs = body_by_h11(head, encoded)
    body, chunks = ChunkedBody(1 << 20), ResponseChunks()
    with suppress(BadRequest):
        body.feed(encoded)
    with suppress(TransportError):
        found = b"".join(map(bytes, chunks.feed(memoryview(encoded))))
    event(f"ours {'complete' if body.complete else 'not'}, theirs {'not' if theirs is None else 'complete'}")
    if body.complete and theirs is not None:
        assert bytes(body.body) == theirs
    if chunks.complete and theirs is not None:
        assert found == theirs


@pytest.mark.parametrize("streaming", [False, True])
def test_h11_reads_what_our_server_answers(streaming):
    async def chunks():
        yield b"wiki"
        yield b"pedia" * 10_000

    def handler(request):
        if streaming:
            return StreamingResponse(200, chunks(), [("x-method", request.method)])
        return Response(200, b"wiki" + b"pedia" * 10_000, [("x-method", request.method)])

    async def main():
        async with HttpServer(handler) as server:
            reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
            client = h11.Connection(h11.CLIENT)
            try:
                for method in ("POST", "HEAD", "GET"):
                    writer.write(client.send(h11.Request(method=method, target="/x", headers=[("host", "x")])))
                    writer.write(client.send(h11.EndOfMessage()))
                    status, headers, body = await read_answer(client, reader)
                    assert (status, headers["x-method"]) == (200, method)
                    assert body == (b"" if method == "HEAD" else b"wiki" + b"pedia" * 10_000)
                    client.start_next_cycle()
            finally:
                writer.close()
                await writer.wait_closed()

    async def read_answer(client, reader):
        status, headers, body = 0, {}, b""
        while True:
            found = client.next_event()
            if found is h11.NEED_DATA:
                client.receive_data(await reader.read(65_536))
            elif isinstance(found, h11.Response):
                status, headers = found.status_code, joined(found.headers)
            elif isinstance(found, h11.Data):
                body += bytes(found.data)
            else:
                assert isinstance(found, h11.EndOfMessage)
                return status, headers, body

    asyncio.run(asyncio.wait_for(main(), 20))
