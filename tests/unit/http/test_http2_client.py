"""The HTTP/2 connection against a scripted peer: what ends one stream, what ends all, what is granted to whom."""

import asyncio

import h2.config
import h2.connection
import h2.errors
import h2.events
import pytest

from anabranch._http.client.http2_connection import Http2ClientConnection
from anabranch._http.client.limits import ClientTimeouts
from anabranch.errors import TransportError
from patience import PATIENCE


class Transport(asyncio.Transport):
    def __init__(self, peer):
        super().__init__()
        self.peer = peer
        self.closed = False

    def write(self, data):
        self.peer.hear(data)

    def is_closing(self):
        return self.closed

    def abort(self):
        self.closed = True


class Peer:
    """A server made of h2 alone."""

    def __init__(self):
        self.h2 = h2.connection.H2Connection(h2.config.H2Configuration(client_side=False, header_encoding="utf-8"))
        self.h2.initiate_connection()
        self.events = []
        self.connection = Http2ClientConnection(asyncio.get_running_loop(), "https://peer", "peer:1", ClientTimeouts())
        self.transport = Transport(self)
        self.connection.connection_made(self.transport)
        self.say()

    def hear(self, data):
        self.events += self.h2.receive_data(data)

    def say(self, data=None):
        data = memoryview(self.h2.data_to_send() if data is None else data)
        while data:
            room = self.connection.get_buffer(-1)
            step = min(len(room), len(data))
            room[:step] = data[:step]
            self.connection.buffer_updated(step)
            data = data[step:]

    async def accept(self, body=b"body"):
        opening = asyncio.ensure_future(self.connection.open_stream([("host", "x"), ("x-a", "1")], body))
        await asyncio.sleep(0)
        stream_id = max(e.stream_id for e in self.events if isinstance(e, h2.events.RequestReceived))
        self.h2.send_headers(stream_id, [(":status", "200"), ("x-amzn-requestid", "id")])
        self.say()
        return stream_id, await opening


def run(main):
    async def guarded():
        async with asyncio.timeout(PATIENCE):
            await main()

    asyncio.run(guarded())


def test_a_request_names_its_authority_and_drops_what_http2_forbids():
    async def main():
        peer = Peer()
        await peer.accept(b"the body")
        (request,) = [event for event in peer.events if isinstance(event, h2.events.RequestReceived)]
        headers = dict(request.headers)
        assert headers[":authority"] == "peer:1"
        assert "host" not in headers
        assert headers["x-a"] == "1"
        (data,) = [event for event in peer.events if isinstance(event, h2.events.DataReceived)]
        assert data.data == b"the body"

    run(main)


WINDOW = 64 << 10


def test_a_server_may_send_64_kib_and_no_more_before_a_read():
    async def main():
        peer = Peer()
        stream_id, stream = await peer.accept()
        assert peer.h2.local_flow_control_window(stream_id) == WINDOW
        for _ in range(4):
            peer.h2.send_data(stream_id, b"x" * 16_384)
        peer.say()
        assert peer.h2.local_flow_control_window(stream_id) == 0
        assert sum(map(len, await stream.receive())) == WINDOW
        assert peer.h2.local_flow_control_window(stream_id) == 0
        reading = asyncio.ensure_future(stream.receive())
        await asyncio.sleep(0)
        assert peer.h2.local_flow_control_window(stream_id) == WINDOW
        reading.cancel()

    run(main)


def updates(peer):
    return [event for event in peer.events if isinstance(event, h2.events.WindowUpdated) and event.stream_id]


def test_the_rest_of_an_expected_message_is_granted_in_one_update():
    async def main():
        peer = Peer()
        stream_id, stream = await peer.accept()
        for _ in range(4):
            peer.h2.send_data(stream_id, b"x" * 16_384)
        peer.say()
        await stream.receive()
        stream.expect(1_000_000)
        assert peer.h2.local_flow_control_window(stream_id) == 1_000_000 + WINDOW
        for _ in range(61):
            peer.h2.send_data(stream_id, b"x" * 16_384)
        peer.say()
        assert sum(map(len, await stream.receive())) == 61 * 16_384
        assert len(updates(peer)) == 1

    run(main)


def test_every_stream_can_send_its_window_however_many_others_are_not_read():
    async def main():
        peer = Peer()
        opened = [await peer.accept() for _ in range(20)]
        opened[0][1].expect(300_000)
        for stream_id, _ in opened:
            while peer.h2.local_flow_control_window(stream_id):
                peer.h2.send_data(stream_id, b"x" * min(16_384, peer.h2.local_flow_control_window(stream_id)))
        peer.say()
        received = [sum(map(len, await stream.receive())) for _, stream in opened]
        assert received == [300_000 + WINDOW] + [WINDOW] * 19

    run(main)


def test_data_of_closed_streams_does_not_use_up_the_window_of_the_others():
    async def main():
        peer = Peer()
        for _ in range(40):
            stream_id, stream = await peer.accept()
            while room := peer.h2.local_flow_control_window(stream_id):
                peer.h2.send_data(stream_id, b"x" * min(16_384, room))
            stream.close()  # before the data arrives
            peer.say()
        stream_id, _ = await peer.accept()
        assert peer.h2.local_flow_control_window(stream_id) == WINDOW

    run(main)


def test_padding_counts_against_the_window():
    async def main():
        peer = Peer()
        stream_id, stream = await peer.accept()
        peer.h2.send_data(stream_id, b"", pad_length=200)
        peer.h2.send_data(stream_id, b"data", pad_length=200)
        peer.say()
        assert b"".join(await stream.receive()) == b"data"
        assert stream.window_bytes == WINDOW - 4 - 2 * 201 == peer.h2.local_flow_control_window(stream_id)

    run(main)


def test_no_stream_is_opened_on_a_connection_whose_server_was_silent():
    async def main():
        peer = Peer()
        _, first = await peer.accept()
        other_id, other = await peer.accept()
        first.close(silent=True)
        assert not peer.connection.usable
        peer.h2.send_data(other_id, b"still here")
        peer.say()
        assert b"".join(await other.receive()) == b"still here"

    run(main)


def test_a_reset_ends_its_stream_alone():
    async def main():
        peer = Peer()
        first_id, first = await peer.accept()
        second_id, second = await peer.accept()
        peer.h2.reset_stream(first_id, h2.errors.ErrorCodes.INTERNAL_ERROR)
        peer.h2.send_data(second_id, b"still here", end_stream=True)
        peer.say()
        with pytest.raises(TransportError, match="reset the stream"):
            await first.receive()
        assert b"".join(await second.receive()) == b"still here"
        assert await second.receive() == []
        assert not peer.connection._streams

    run(main)


def test_a_goaway_keeps_the_streams_it_covers_and_the_others_were_not_processed():
    async def main():
        peer = Peer()
        first_id, first = await peer.accept()
        late = asyncio.ensure_future(peer.connection.open_stream([], b""))
        await asyncio.sleep(0)
        peer.h2.send_data(first_id, b"last words")
        peer.h2.close_connection(last_stream_id=first_id)
        peer.say()
        with pytest.raises(TransportError, match="did not process the request") as failure:
            await late
        assert not failure.value.maybe_sent
        assert b"".join(await first.receive()) == b"last words"
        assert not peer.connection.usable

    run(main)


def test_broken_rules_and_a_lost_connection_end_every_stream():
    async def main():
        for end, words in (
            (lambda peer: peer.say(b"\x00\x00\x05\x06\x00\x00\x00\x00\x00xxxxx"), "violated the HTTP/2 protocol"),
            (lambda peer: peer.connection.connection_lost(OSError("gone")), "closed the connection.*gone"),
            (lambda peer: peer.connection.connection_lost(None), "closed the connection"),
        ):
            peer = Peer()
            streams = [(await peer.accept())[1] for _ in range(2)]
            waiting = [asyncio.ensure_future(stream.receive()) for stream in streams]
            await asyncio.sleep(0)
            end(peer)
            for one in waiting:
                with pytest.raises(TransportError, match=words):
                    await one
            assert not peer.connection._streams
            assert not peer.connection.usable

    run(main)


def test_closing_a_stream_resets_it_and_gives_its_bytes_back_to_the_connection():
    async def main():
        peer = Peer()
        stream_id, stream = await peer.accept()
        window = peer.h2.outbound_flow_control_window
        peer.h2.send_data(stream_id, b"x" * 10_000)
        peer.say()
        stream.close()
        (reset,) = [event for event in peer.events if isinstance(event, h2.events.StreamReset)]
        assert reset.error_code == h2.errors.ErrorCodes.CANCEL
        stream.close()
        assert peer.h2.outbound_flow_control_window <= window

    run(main)


def test_a_stream_that_was_given_up_for_its_silence_makes_room_for_another_when_it_is_closed():
    async def main():
        peer = Peer()
        _, stream = await peer.accept()
        reading = asyncio.ensure_future(stream.receive())
        await asyncio.sleep(0)
        stream.check(asyncio.get_running_loop().time() + ClientTimeouts().message)
        with pytest.raises(TransportError, match="sent nothing"):
            await reading
        stream.close()
        assert not peer.connection._streams
        assert [event for event in peer.events if isinstance(event, h2.events.StreamReset)]

    run(main)


def test_data_for_a_stream_that_was_closed_is_passed_over():
    async def main():
        peer = Peer()
        stream_id, stream = await peer.accept()
        peer.h2.send_data(stream_id, b"on its way")
        data = peer.h2.data_to_send()
        stream.close()
        peer.say(data)
        assert peer.connection.usable

    run(main)
