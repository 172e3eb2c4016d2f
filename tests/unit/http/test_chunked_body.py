import pytest

from anabranch._http.chunked_body import ChunkedBody
from anabranch._http.request_head import BadRequest

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
