"""The local Kinesis beside moto's server: PutRecords of 500 x 1 KB and GetRecords of 1000 x 1 KB.

Both run as processes of their own, one call at a time. The client is a blocking socket with requests made beforehand,
which reads an answer and throws it away, so that the server is what is measured: calls per second by the clock, and the
server's own CPU time where the system tells it. Rounds are interleaved; ratios are those of neighbours in a round.
"""

import base64
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from contextlib import ExitStack, contextmanager
from pathlib import Path

from measure import target, value

ROUNDS = 7
ROUND_SECONDS = 0.5
GOAL = 10.0


class Client:
    def __init__(self, port):
        self.port = port
        self.socket = None
        self.buffer = bytearray(1 << 20)

    def call(self, request):
        """Sends, and reads to the end of the answer; returns as much of the body as came with the head."""
        if self.socket is None:
            self.socket = socket.create_connection(("127.0.0.1", self.port), timeout=60)
            self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket.sendall(request)
        received = b""
        while (head_end := received.find(b"\r\n\r\n")) < 0:
            received += self.receive()
        head = received[:head_end].lower()
        assert b" 200 " in head.partition(b"\r\n")[0], received[:2000]
        body = received[head_end + 4 :]
        missing = int(head.partition(b"\r\ncontent-length:")[2].partition(b"\r\n")[0]) - len(body)
        while missing:
            piece = self.receive()
            missing -= len(piece)
            if len(body) < 65_536:
                body += piece
        if b"\r\nconnection: close" in head:  # moto keeps no connection
            self.socket.close()
            self.socket = None
        return body

    def receive(self):
        count = self.socket.recv_into(self.buffer)
        if not count:
            raise ConnectionError("the server hung up")
        return memoryview(self.buffer)[:count]

    def answer(self, operation, members):
        return json.loads(self.call(request(operation, members)) or b"{}")


def request(operation, members):
    body = json.dumps(members).encode()
    head = (
        "POST / HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/x-amz-json-1.1\r\n"
        f"X-Amz-Target: Kinesis_20131202.{operation}\r\nX-Amz-Date: 20261116T000000Z\r\n"
        "Authorization: AWS4-HMAC-SHA256 Credential=local/20261116/us-east-1/kinesis/aws4_request, "
        f"SignedHeaders=host, Signature=00\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


def put_records(count):
    data = base64.b64encode(os.urandom(1_000)).decode()
    records = [{"Data": data, "PartitionKey": f"key-{number:012d}"} for number in range(count)]
    return request("PutRecords", {"StreamName": "bench", "Records": records})


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextmanager
def server(command, port):
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        for _ in range(300):
            try:
                socket.create_connection(("127.0.0.1", port), timeout=1).close()
                break
            except OSError:
                time.sleep(0.1)
        yield process
    finally:
        process.terminate()
        process.wait()


def cpu_seconds(process):
    """User and system time so far; 0 where there is no /proc."""
    stat = Path(f"/proc/{process.pid}/stat")
    if not stat.exists():
        return 0.0
    fields = stat.read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def prepare(client):
    client.answer("CreateStream", {"StreamName": "bench", "ShardCount": 4})
    client.answer("CreateStream", {"StreamName": "read", "ShardCount": 1})
    time.sleep(1)
    data = base64.b64encode(os.urandom(1_000)).decode()
    records = [{"Data": data, "PartitionKey": f"key-{number:012d}"} for number in range(500)]
    for _ in range(2):
        client.answer("PutRecords", {"StreamName": "read", "Records": records})
    shard = client.answer("DescribeStream", {"StreamName": "read"})["StreamDescription"]["Shards"][0]["ShardId"]
    iterator = client.answer(
        "GetShardIterator", {"StreamName": "read", "ShardId": shard, "ShardIteratorType": "TRIM_HORIZON"}
    )["ShardIterator"]
    return request("GetRecords", {"ShardIterator": iterator, "Limit": 1_000})


def measure(client, process, raw):
    """Calls a second, and milliseconds of the server's CPU a call."""
    client.call(raw)
    calls, cpu, start = 0, cpu_seconds(process), time.perf_counter()
    while (elapsed := time.perf_counter() - start) < ROUND_SECONDS:
        client.call(raw)
        calls += 1
    return calls / elapsed, (cpu_seconds(process) - cpu) / calls * 1_000


def main():
    ports = {"anabranch": free_port(), "moto": free_port()}
    commands = {
        "anabranch": [str(Path(sys.executable).with_name("anabranch")), "serve", "--port", str(ports["anabranch"])],
        "moto": [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(ports["moto"])],
    }
    with ExitStack() as stack:
        processes = {name: stack.enter_context(server(commands[name], ports[name])) for name in ports}
        clients = {name: Client(port) for name, port in ports.items()}
        reads = {name: prepare(client) for name, client in clients.items()}
        write = put_records(500)
        for title, raw in (
            ("PutRecords 500 x 1 KB", dict.fromkeys(ports, write)),
            ("GetRecords 1000 x 1 KB", reads),
        ):
            rounds = {name: [] for name in ports}
            for _ in range(ROUNDS):
                for name in ports:
                    rounds[name].append(measure(clients[name], processes[name], raw[name]))
            report(title, rounds)


def report(title, rounds):
    print(f"\n{title}")
    print(f"  {'':12}{'calls a second':>32}{'ms of CPU a call':>20}")
    for name, figures in rounds.items():
        low, median, high = statistics.quantiles([calls for calls, _ in figures], n=4, method="inclusive")
        cpu = statistics.median(cpu for _, cpu in figures)
        value(f"{title}: {name}", median, "calls a second")
        value(f"{title}: {name}, CPU of a call", cpu, "ms")
        print(f"  {name:12}{median:14.1f} ({low:.1f} to {high:.1f})".ljust(46) + f"{cpu:20.2f}")
    ratios = [ours / theirs for (ours, _), (theirs, _) in zip(rounds["anabranch"], rounds["moto"], strict=True)]
    low, median, high = statistics.quantiles(ratios, n=4, method="inclusive")
    verdict = target(f"{title}: anabranch / moto, calls a second", median, GOAL)
    print(f"  anabranch does {median:.1f} times moto's calls ({low:.1f} to {high:.1f}); {verdict}")


if __name__ == "__main__":
    main()
