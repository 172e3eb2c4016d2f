"""A Kinesis that answers with bytes made beforehand, so that beside it only the client is measured.

Run as a process of its own, on a core of its own: `canned_kinesis.py CERTIFICATE KEY CORE`. It prints its port and
lives until its standard input closes. What GetRecords returns is named in the iterator (`1000x1024`), as is what a
subscription pushes, in the shard's name (`20x1000x1024`: 20 events of 1000 records of 1 KiB). Whole streams, for
consumers, are named as `canned_stream.py` says. HTTP/1.1, and HTTP/2 for subscriptions where ALPN asks for it.
"""

import asyncio
import base64
import os
import random
import re
import ssl
import sys
from functools import cache

import canned_stream
import h2.config
import h2.connection
import h2.events

from anabranch._wire.event_stream import encode_message

DATE = b"Mon, 16 Nov 2026 10:00:00 GMT"
REQUEST_ID = b"cabb1ff7-e5d8-589d-9397-46992fda7f59"
FRAME_BYTES = 16_384  # what servers send by default, whatever a client would take

HEAD = (
    b"HTTP/1.1 200 OK\r\nx-amzn-RequestId: " + REQUEST_ID + b"\r\nx-amz-id-2: " + b"e" * 76 + b"\r\nDate: " + DATE
    + b"\r\nContent-Type: application/x-amz-json-1.1\r\n"
)  # fmt: skip
_TARGET = re.compile(rb"\r\nx-amz-target: *Kinesis_20131202\.(\w+)", re.IGNORECASE)
_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)
_SHAPE = re.compile(rb"(?:(\d+)x)?(\d+)x(\d+)")


def records(count: int, size: int) -> bytes:
    chance = random.Random(count * size)
    start = 49_645_000_000_000_000_000_000_000_000_000_000_000_000_000_000_000_000_000
    return b",".join(
        b'{"SequenceNumber":"%d","ApproximateArrivalTimestamp":1.7%dE9,"Data":"%s","PartitionKey":"user-%011d"}'
        % (start + n, 10_000_000_000 + n, base64.b64encode(chance.randbytes(size)), n)
        for n in range(count)
    )


@cache
def get_records(count: int, size: int) -> bytes:
    body = b'{"MillisBehindLatest":0,"NextShardIterator":"%dx%d-%s","Records":[%s]}' % (
        count, size, b"A" * 210, records(count, size),
    )  # fmt: skip
    return HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body


@cache
def put_records(count: int) -> bytes:
    entry = b'{"SequenceNumber":"4964%s","ShardId":"shardId-000000000000"}' % (b"0" * 52)
    body = b'{"FailedRecordCount":0,"Records":[%s]}' % b",".join([entry] * count)
    return HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body


@cache
def event(count: int, size: int) -> bytes:
    headers = {
        ":message-type": "event",
        ":event-type": "SubscribeToShardEvent",
        ":content-type": "application/x-amz-json-1.1",
    }
    body = b'{"ContinuationSequenceNumber":"4964","MillisBehindLatest":0,"Records":[%s]}' % records(count, size)
    return encode_message(headers, body)


INITIAL = encode_message(
    {":message-type": "event", ":event-type": "initial-response", ":content-type": "application/x-amz-json-1.1"}, b"{}"
)


def pushed(shape: re.Match[bytes]) -> list[bytes]:
    """The whole of a subscription, in pieces of a frame's size."""
    events, count, size = (int(number or 1) for number in shape.groups())
    whole = INITIAL + event(count, size) * events
    return [whole[start : start + FRAME_BYTES] for start in range(0, len(whole), FRAME_BYTES)]


def shape_in(body: bytes) -> re.Match[bytes]:
    found = _SHAPE.search(body)
    assert found is not None
    return found


class Http1(asyncio.Protocol):
    def connection_made(self, transport):
        self.transport = transport
        self.received = bytearray()
        self.wanted = 0

    def data_received(self, data):
        received = self.received
        received += data
        while len(received) >= self.wanted:
            head_end = received.find(b"\r\n\r\n")
            if head_end < 0:
                return
            length = _LENGTH.search(received, 0, head_end + 2)
            end = head_end + 4 + (int(length[1]) if length else 0)
            if len(received) < end:
                self.wanted = end
                return
            self.answer(_TARGET.search(received, 0, head_end + 2)[1], bytes(received[head_end + 4 : end]))
            del received[:end]
            self.wanted = 0

    def answer(self, operation, body):
        of_stream = canned_stream.answer(operation, body)
        if of_stream is not None:
            self.transport.write(b"".join((HEAD, b"Content-Length: %d\r\n\r\n" % len(of_stream), of_stream)))
        elif operation == b"PutRecords":
            self.transport.write(put_records(body.count(b'"PartitionKey"')))
        elif operation == b"SubscribeToShard":
            head = HEAD.replace(b"x-amz-json-1.1", b"vnd.amazon.eventstream") + b"Transfer-Encoding: chunked\r\n\r\n"
            chunks = [b"%x\r\n%s\r\n" % (len(piece), piece) for piece in pushed(shape_in(body))]
            self.transport.write(b"".join([head, *chunks, b"0\r\n\r\n"]))
        else:
            shape = shape_in(body)
            self.transport.write(get_records(int(shape[2]), int(shape[3])))


class Http2(asyncio.Protocol):
    def connection_made(self, transport):
        self.transport = transport
        self.h2 = h2.connection.H2Connection(h2.config.H2Configuration(client_side=False, header_encoding=None))
        self.h2.initiate_connection()
        self.bodies = {}
        self.waiting = {}
        self.transport.write(self.h2.data_to_send())

    def data_received(self, data):
        for happened in self.h2.receive_data(data):
            if isinstance(happened, h2.events.DataReceived):
                self.bodies.setdefault(happened.stream_id, bytearray()).extend(happened.data)
                self.h2.acknowledge_received_data(happened.flow_controlled_length, happened.stream_id)
            elif isinstance(happened, h2.events.StreamEnded):
                pieces = pushed(shape_in(bytes(self.bodies.pop(happened.stream_id))))
                self.waiting[happened.stream_id] = iter(pieces), None
                self.h2.send_headers(
                    happened.stream_id,
                    [(":status", "200"), ("content-type", "application/vnd.amazon.eventstream"), ("date", DATE)],
                )
            elif isinstance(happened, h2.events.StreamReset):
                self.waiting.pop(happened.stream_id, None)
        for stream_id in list(self.waiting):
            self.push(stream_id)
        self.transport.write(self.h2.data_to_send())

    def push(self, stream_id):
        pieces, held = self.waiting[stream_id]
        while True:
            piece = held or next(pieces, None)
            if piece is None:
                self.h2.end_stream(stream_id)
                del self.waiting[stream_id]
                return
            if self.h2.local_flow_control_window(stream_id) < len(piece):
                self.waiting[stream_id] = pieces, piece
                return
            self.h2.send_data(stream_id, piece)
            held = None


class Doorway(asyncio.Protocol):
    def connection_made(self, transport):
        negotiated = transport.get_extra_info("ssl_object").selected_alpn_protocol()
        protocol = Http2() if negotiated == "h2" else Http1()
        transport.set_protocol(protocol)
        protocol.connection_made(transport)


async def main(certificate: str, key: str, core: int) -> None:
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {core})
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(certificate, key)
    tls.set_alpn_protocols(["h2", "http/1.1"])
    loop = asyncio.get_running_loop()
    server = await loop.create_server(Doorway, "127.0.0.1", 0, ssl=tls)
    print(server.sockets[0].getsockname()[1], flush=True)
    await asyncio.to_thread(sys.stdin.read)
    server.close()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2], int(sys.argv[3])))
