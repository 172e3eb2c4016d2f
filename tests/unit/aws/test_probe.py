"""The unsigned question to an endpoint: any answer counts, and its Date tells how wrong our clock is."""

import asyncio
import time
from email.utils import formatdate

import pytest

from anabranch._aws.account import ServiceAddress
from anabranch._aws.service import probe
from anabranch._http.client.dialer import parse_endpoint
from anabranch.errors import TransportError
from canned_server import answer, canned_server, read_request


def ask(headers):
    async def main():
        asked = []

        async def refuse(reader, writer):
            asked.append(await read_request(reader))
            writer.write(answer(b"{}", b"403 Forbidden", headers))
            await writer.drain()
            await reader.read()

        async with canned_server(refuse) as server:
            found = await probe(ServiceAddress("eu-west-1", parse_endpoint(server.url)))
            await server.all_gone()
        assert b"authorization" not in asked[0].lower()
        return found

    return asyncio.run(main())


@pytest.mark.parametrize("seconds", [-600, 0, 600])
def test_an_error_response_also_has_the_time(seconds):
    date = formatdate(time.time() - seconds, usegmt=True).encode()
    found = ask(b"date: %b\r\n" % date)
    assert abs(found.clock_ahead_ms - seconds * 1000) < 30_000
    assert found.round_trip_ms >= 0


@pytest.mark.parametrize("headers", [b"", b"date: yesterday\r\n"])
def test_without_a_date_the_clock_is_not_judged(headers):
    assert ask(headers).clock_ahead_ms is None


def test_an_unreachable_endpoint_is_reported_as_usual():
    with pytest.raises(TransportError, match="refused the connection"):
        asyncio.run(probe(ServiceAddress("eu-west-1", parse_endpoint("http://127.0.0.1:9"))))
