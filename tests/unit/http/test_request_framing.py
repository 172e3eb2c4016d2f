import pytest

from anabranch._http.server.request_framing import BadRequest, ChunkedBody, parse_request_head


def head(*lines, request_line="POST / HTTP/1.1"):
    return "\r\n".join([request_line, *lines]).encode("latin-1")


def refusal(raw):
    with pytest.raises(BadRequest) as refused:
        parse_request_head(raw)
    return refused.value.status


def test_names_are_lowered_and_repeated_values_are_joined():
    parsed = parse_request_head(head("Host: x", "X-A: 1", "x-a:2 "))
    assert parsed.headers == {"host": "x", "x-a": "1, 2"}
    assert (parsed.method, parsed.target, parsed.http_version) == ("POST", "/", "1.1")


@pytest.mark.parametrize(
    "version, connection, keep_alive",
    [("1.1", None, True), ("1.1", "close", False), ("1.0", None, False), ("1.0", "Keep-Alive", True)],
)
def test_a_connection_is_kept_as_its_version_and_header_say(version, connection, keep_alive):
    lines = ["Host: x"] + ([f"Connection: {connection}"] if connection else [])
    assert parse_request_head(head(*lines, request_line=f"GET / HTTP/{version}")).keep_alive is keep_alive


def test_the_length_of_a_body_is_known_from_the_head():
    assert parse_request_head(head("Host: x", "Content-Length: 12")).content_length == 12
    assert parse_request_head(head("Host: x", "Transfer-Encoding: Chunked")).chunked
    assert parse_request_head(head("Host: x", "Expect: 100-Continue")).expects_continue


@pytest.mark.parametrize(
    "lines, status",
    [
        ([], 400),  # no host
        (["Host: x", "host: x"], 400),
        (["Host: x", "Host: y"], 400),
        (["Host: x", "no colon"], 400),
        (["Host: x", " folded: line"], 400),
        (["Host: x", "space : before"], 400),
        (["Host: x", "nul: \x00"], 400),
        (["Host: x", "Content-Length: 1, 1"], 400),
        (["Host: x", "Content-Length: -1"], 400),
        (["Host: x", "Content-Length: +1"], 400),
        (["Host: x", "Content-Length: 1", "Transfer-Encoding: chunked"], 400),
        (["Host: x", "Content-Length: 1", "Content-Length: 2"], 400),
        (["Host: x", "Transfer-Encoding: gzip, chunked"], 501),
        (["Host: x", *(f"h{n}: 1" for n in range(300))], 431),
    ],
)
def test_what_two_readers_could_read_differently_is_refused(lines, status):
    assert refusal(head(*lines)) == status


@pytest.mark.parametrize(
    "line, status",
    [
        ("GET /", 400),
        ("GET  / HTTP/1.1", 400),
        ("GET / HTTP/2.0", 505),
        ("GET / HTTP/1.2", 400),
        ("", 400),
        ("G\x00T / HTTP/1.1", 400),
    ],
)
def test_a_request_line_has_one_form(line, status):
    assert refusal(head("Host: x", request_line=line)) == status


# Chunked bodies

WHOLE = b"4;ext=1\r\nwiki\r\n5\r\npedia\r\n0\r\nTrailer: x\r\n\r\n"


@pytest.mark.parametrize("step", [1, 2, 3, 7, len(WHOLE)])
def test_a_body_split_anywhere_is_put_together(step):
    body = ChunkedBody(100)
    waiting = b""
    for start in range(0, len(WHOLE), step):
        waiting += WHOLE[start : start + step]
        waiting = waiting[body.feed(waiting) :]
    assert body.complete
    assert body.body == b"wikipedia"
    assert waiting == b""


def test_what_follows_the_body_is_left_for_the_next_request():
    body = ChunkedBody(100)
    assert body.feed(WHOLE + b"GET /") == len(WHOLE)


@pytest.mark.parametrize(
    "raw, status",
    [
        (b"x\r\n", 400),
        (b"-1\r\n", 400),
        (b"123456789\r\n", 400),
        (b"3\r\nabcd\r\n", 400),
        (b"ffff\r\n", 413),
        (b"1;" + b"e" * 5000, 400),
        (
            b"0\r\n" + b"t: " + b"x" * 4000 + b"\r\nt: " + b"y" * 4090 + b"\r\n" + (b"u: " + b"z" * 4000 + b"\r\n") * 3,
            431,
        ),
    ],
)
def test_bytes_that_are_no_chunks_are_refused(raw, status):
    body = ChunkedBody(1000)
    with pytest.raises(BadRequest) as refused:
        body.feed(raw)
    assert refused.value.status == status
