import asyncio
import time

import h2.config
import h2.connection
import h2.events
import pytest

from anabranch._http.server.exchange import Response, ServerLimits, ServerState
from anabranch._http.server.http2_connection import Http2ServerConnection


class Transport(asyncio.Transport):
    """Remembers what was written and whether reading goes on."""

    def __init__(self):
        super().__init__()
        self.written = bytearray()
        self.reading = True
        self.aborted = self.closed = False

    def write(self, data):
        self.written += data

    def is_closing(self):
        return self.closed or self.aborted

    def pause_reading(self):
        self.reading = False

    def resume_reading(self):
        self.reading = True

    def close(self):
        self.closed = True

    def abort(self):
        self.aborted = True


@pytest.fixture
def connected():
    async def make():
        service = ServerState(lambda request: Response(200, b"x" * 100), ServerLimits())
        connection, transport = Http2ServerConnection(service), Transport()
        connection.connection_made(transport)
        return connection, transport

    return asyncio.run(make())


def client_with_request():
    client = h2.connection.H2Connection()
    client.initiate_connection()
    client.send_headers(
        1, [(":method", "GET"), (":path", "/"), (":scheme", "http"), (":authority", "x")], end_stream=True
    )
    return client


def test_while_nothing_can_be_written_nothing_is_read(connected):
    connection, transport = connected
    connection.pause_writing()
    assert not transport.reading
    connection.resume_writing()
    assert transport.reading


def test_a_client_that_reads_nothing_for_too_long_is_let_go(connected):
    connection, transport = connected
    connection.pause_writing()
    connection.check(time.monotonic())
    assert not transport.aborted
    connection.check(time.monotonic() + ServerLimits().write_timeout)
    assert transport.aborted


def test_an_answer_waits_until_the_socket_takes_it(connected):
    connection, transport = connected
    client = client_with_request()
    connection.pause_writing()
    connection.data_received(client.data_to_send())
    assert not any(isinstance(e, h2.events.DataReceived) for e in client.receive_data(bytes(transport.written)))
    transport.written.clear()
    connection.resume_writing()
    events = client.receive_data(bytes(transport.written))
    assert [event.data for event in events if isinstance(event, h2.events.DataReceived)] == [b"x" * 100]
    assert isinstance(events[-1], h2.events.StreamEnded)


def test_a_request_that_was_reset_in_the_same_breath_is_no_error(connected):
    connection, transport = connected
    client = client_with_request()
    client.reset_stream(1)
    connection.data_received(client.data_to_send())
    assert not transport.closed


def test_a_client_that_sends_goaway_is_disconnected(connected):
    connection, transport = connected
    client = client_with_request()
    client.close_connection()
    connection.data_received(client.data_to_send())
    assert transport.closed


@pytest.mark.parametrize("extra", [[("host", "x"), ("host", "x")], [("host", "y")], [(":authority", "y")]])
def test_a_request_for_two_hosts_is_refused(connected, extra):
    connection, transport = connected
    unchecked = h2.config.H2Configuration(validate_outbound_headers=False, normalize_outbound_headers=False)
    client = h2.connection.H2Connection(unchecked)
    client.initiate_connection()
    pseudo = [(":method", "GET"), (":path", "/"), (":scheme", "http"), (":authority", "x")]
    client.send_headers(1, sorted([*pseudo, *extra], key=lambda pair: not pair[0].startswith(":")), end_stream=True)
    connection.data_received(client.data_to_send())
    assert transport.closed
    assert not any(
        isinstance(event, h2.events.ResponseReceived) for event in client.receive_data(bytes(transport.written))
    )
