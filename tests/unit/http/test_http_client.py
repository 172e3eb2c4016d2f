import asyncio
from contextlib import asynccontextmanager

import pytest
from blockbuster import blockbuster_ctx

from anabranch._http.client import connection
from anabranch._http.client.connection import NoRoomError
from anabranch._http.client.dialer import Dialer, parse_endpoint
from anabranch._http.client.http_client import HttpClient
from anabranch._http.client.limits import ClientTimeouts
from anabranch.errors import TransportError, UsageError
from canned_server import answer, canned_server, read_request


def run(main):
    async def guarded():
        async with asyncio.timeout(20):
            with blockbuster_ctx("anabranch"):
                await main()

    asyncio.run(guarded())


@asynccontextmanager
async def client_of(conversation, *, connections_max=4, timeouts=None):
    async with canned_server(conversation) as server:
        client = HttpClient(
            Dialer(parse_endpoint(server.url)),
            purposes={"reads": connections_max, "writes": 1},
            timeouts=timeouts,
        )
        try:
            yield server, client
        finally:
            await client.close()
            await server.all_gone()


def post(client, *pieces, purpose="reads", **options):
    headers = b"host: here\r\ncontent-length: %d\r\n\r\n" % sum(map(len, pieces))
    options = {"repeatable": True, **options}
    return client.post(purpose, headers, pieces, lambda response: (response.status, bytes(response.body)), **options)


async def echo(reader, writer):
    while True:
        request = await read_request(reader)
        writer.write(answer(request.partition(b"\r\n\r\n")[2]))
        await writer.drain()


def says(*replies):
    """Each connection answers its requests with these, whatever they are, then hangs up."""

    async def conversation(reader, writer):
        for reply in replies:
            await read_request(reader)
            writer.write(reply)
            await writer.drain()
        await reader.read()

    return conversation


def test_calls_share_kept_connections_and_large_bodies_pass_in_both_directions():
    async def main():
        async with client_of(echo) as (server, client):
            large = [bytes([n]) * 65_536 for n in range(40)]
            for _ in range(3):
                assert await post(client, b"small") == (200, b"small")
                assert await post(client, *large) == (200, b"".join(large))
            assert server.connections == 1

    run(main)


@pytest.mark.parametrize(
    "head, ending",
    [
        (b"content-length: 9000000\r\n\r\n", b""),
        (b"transfer-encoding: chunked\r\n\r\n895440\r\n", b"\r\n0\r\n\r\n"),
    ],
)
def test_a_body_without_room_is_not_received(head, ending):
    async def main():
        sent = asyncio.Event()

        async def conversation(reader, writer):
            if await read_request(reader):
                writer.write(b"HTTP/1.1 200 OK\r\n" + head + bytes(9_000_000) + ending)
                await writer.drain()
                sent.set()
                await reader.read()

        async with client_of(conversation) as (server, client):
            asked = []
            with pytest.raises(NoRoomError):
                await post(client, b"x", has_room=asked.append)
            assert len(asked) == 1
            assert asked[0] > 65_536
            assert asked[0] == 9_000_000 or b"chunked" in head
            assert not sent.is_set()
            assert await post(client, b"x", has_room=lambda _: True) == (200, bytes(9_000_000))
            assert server.connections == 2

    run(main)


def test_small_bodies_are_received_without_asking_for_room():
    async def main():
        async with client_of(echo) as (server, client):
            assert await post(client, b"small", has_room=lambda _: False) == (200, b"small")
            assert server.connections == 1

    run(main)


def test_no_more_connections_than_allowed_are_opened_and_waiting_calls_get_their_turn():
    async def main():
        async with client_of(echo, connections_max=3) as (server, client):
            bodies = [b"%d" % n for n in range(50)]
            answers = await asyncio.gather(*(post(client, body) for body in bodies))
            assert [body for _, body in answers] == bodies
            assert server.connections == 3

    run(main)


def test_one_purpose_never_waits_for_another():
    async def main():
        async def conversation(reader, writer):
            request = await read_request(reader)
            if b"stuck" in request:
                await reader.read()
                return
            writer.write(answer(b"done"))
            await reader.read()

        async with client_of(conversation, connections_max=1) as (_, client):
            stuck = asyncio.ensure_future(post(client, b"stuck"))
            await asyncio.sleep(0)
            assert await post(client, b"quick", purpose="writes") == (200, b"done")
            stuck.cancel()
            with pytest.raises(asyncio.CancelledError):
                await stuck

    run(main)


@pytest.mark.parametrize(
    "reply, body",
    [
        (
            b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n3\r\nabc\r\n2;x=y\r\nde\r\n0\r\nt: 1\r\n\r\n",
            b"abcde",
        ),
        (b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok", b"ok"),
        (b"HTTP/1.1 200\r\nContent-Length:2\r\nX-Empty:\r\n\r\nok", b"ok"),
        (b"HTTP/1.1 204 No Content\r\n\r\n", b""),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 2, 2\r\n\r\nok", b"ok"),
    ],
)
def test_a_kept_connection_reads_every_legal_framing(reply, body):
    async def main():
        async with client_of(says(reply, answer(b"next"))) as (server, client):
            assert (await post(client, b"x"))[1] == body
            assert (await post(client, b"x"))[1] == b"next"
            assert server.connections == 1

    run(main)


@pytest.mark.parametrize(
    "reply",
    [
        answer(b"ok", headers=b"connection: close\r\n"),
        b"HTTP/1.0 200 OK\r\ncontent-length: 2\r\n\r\nok",
        b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\ntransfer-encoding: chunked\r\n\r\n2\r\nok\r\n0\r\n\r\n",
    ],
)
def test_a_connection_that_should_not_be_used_again_is_not(reply):
    async def main():
        async with client_of(says(reply)) as (server, client):
            assert (await post(client, b"x"))[1] == b"ok"
            assert (await post(client, b"x"))[1] == b"ok"
            assert server.connections == 2

    run(main)


def test_an_answer_that_ends_with_its_connection_is_read_to_the_end():
    async def main():
        async def conversation(reader, writer):
            await read_request(reader)
            writer.write(b"HTTP/1.1 200 OK\r\n\r\nuntil the ")
            await writer.drain()
            writer.write(b"end")
            await writer.drain()
            writer.close()
            await writer.wait_closed()

        async with client_of(conversation) as (_, client):
            assert await post(client, b"x") == (200, b"until the end")

    run(main)


def test_a_harmless_call_is_repeated_when_a_kept_connection_was_closed_under_it():
    async def main():
        seen = []

        async def conversation(reader, writer):
            while True:
                seen.append(await read_request(reader))
                if len(seen) == 2:
                    return  # hangs up on the second request of a kept connection
                writer.write(answer(b"ok"))

        async with client_of(conversation) as (server, client):
            assert await post(client, b"1") == (200, b"ok")
            assert await post(client, b"2") == (200, b"ok")
            assert server.connections == 2
            assert len(seen) == 3

    run(main)


def test_a_call_that_writes_is_never_sent_twice():
    async def main():
        seen = []

        async def conversation(reader, writer):
            while True:
                seen.append(await read_request(reader))
                if len(seen) == 2:
                    return
                writer.write(answer(b"ok"))

        async with client_of(conversation) as (_, client):
            await post(client, b"1", repeatable=False)
            with pytest.raises(TransportError, match="closed the connection before") as failure:
                await post(client, b"2", repeatable=False)
            assert failure.value.maybe_sent
            assert len(seen) == 2

    run(main)


def test_a_fresh_connection_that_is_dropped_is_an_error_not_a_loop():
    async def main():
        async def conversation(reader, writer):
            await read_request(reader)

        async with client_of(conversation) as (server, client):
            with pytest.raises(TransportError):
                await post(client, b"x")
            assert server.connections == 1

    run(main)


def test_a_write_avoids_a_kept_connection_that_the_server_has_closed():
    async def main():
        closed = asyncio.Event()

        async def conversation(reader, writer):
            await read_request(reader)
            writer.write(answer(b"ok"))
            await writer.drain()
            writer.close()
            closed.set()

        async with client_of(conversation) as (server, client):
            await post(client, b"1", repeatable=False)
            await closed.wait()
            assert await post(client, b"2", repeatable=False) == (200, b"ok")
            assert server.connections == 2

    run(main)


def test_cancelling_a_call_closes_its_connection_at_once_and_frees_its_place():
    async def main():
        asked = asyncio.Event()

        async def conversation(reader, writer):
            request = await read_request(reader)
            if b"hang" in request:
                asked.set()
                await reader.read()
                return
            writer.write(answer(b"ok"))
            await reader.read()

        async with client_of(conversation, connections_max=1) as (server, client):
            call = asyncio.ensure_future(post(client, b"hang"))
            await asked.wait()
            waiting = asyncio.ensure_future(post(client, b"next"))
            await asyncio.sleep(0)
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call
            assert await waiting == (200, b"ok")
            assert server.open == 1

    run(main)


def test_a_cancelled_waiter_passes_its_turn_on():
    async def main():
        async with client_of(echo, connections_max=1) as (server, client):
            calls = [asyncio.ensure_future(post(client, b"%d" % n)) for n in range(6)]
            await asyncio.sleep(0)
            calls[1].cancel()
            calls[3].cancel()
            done = await asyncio.gather(*calls, return_exceptions=True)
            assert [isinstance(result, asyncio.CancelledError) for result in done] == [
                False, True, False, True, False, False,
            ]  # fmt: skip
            assert server.connections == 1

    run(main)


def test_silence_and_slow_dripping_end_at_their_deadlines():
    async def main():
        async def silent(reader, writer):
            await reader.read()

        async def dripping(reader, writer):
            await read_request(reader)
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 100000\r\n\r\n")
            while True:
                writer.write(b"x")
                await writer.drain()
                await asyncio.sleep(0.01)

        async with client_of(silent, timeouts=ClientTimeouts(read=0.2)) as (_, client):
            with pytest.raises(TransportError, match=r"sent nothing for 0\.2 s"):
                await post(client, b"x")
        async with client_of(dripping, timeouts=ClientTimeouts(total=0.6)) as (_, client):
            with pytest.raises(TransportError, match="no complete response in time"):
                await post(client, b"x")
        async with client_of(silent, connections_max=1, timeouts=ClientTimeouts(total=0.6)) as (_, client):
            results = await asyncio.gather(post(client, b"1"), post(client, b"2"), return_exceptions=True)
            assert "no complete response" in str(results[0])
            assert "busy until the deadline" in str(results[1])
            assert not results[1].maybe_sent

    run(main)


def test_a_refusal_before_all_was_sent_is_read_and_the_connection_is_dropped():
    async def main():
        async def conversation(reader, writer):
            await reader.readuntil(b"\r\n\r\n")
            writer.write(answer(b"too large", status=b"413 Content Too Large"))
            await writer.drain()
            await reader.read()

        async with client_of(conversation) as (_, client):
            pieces = [b"x" * 65_536] * 2_000
            assert await post(client, *pieces) == (413, b"too large")

    run(main)


@pytest.mark.parametrize(
    "reply, words",
    [
        (b"SSH-2.0-OpenSSH_9.2\r\n\r\n", "not HTTP/1.1"),
        (b"HTTP/1.1 200 OK\r\n folded: 1\r\n\r\n", "not `name: value`"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 1, 2\r\n\r\nxx", "not one number"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: -1\r\n\r\n", "not one number"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\n\r\nxx", "longer than its content-length"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 99999999999\r\n\r\n", "has 99999999999 bytes"),
        (b"HTTP/1.1 200 OK\r\ntransfer-encoding: gzip\r\n\r\n", "transfer coding"),
        (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n", "not a hexadecimal number"),
        (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n1\r\nab\r\n", "longer than its size"),
        (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\nx", "bytes after its response"),
        (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n" + b"1" * 5_000, "too long"),
        (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n0\r\n" + b"t: x\r\n" * 5_000, "trailers"),
        (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n" + b"4\r\nabcd\r\n" * 600, "longer than 2000 bytes"),
        (b"HTTP/1.1 200 OK\r\n" + b"a: b\r\n" * 200 + b"\r\n", "more than 128 headers"),
        (b"HTTP/1.1 200 OK\r\na: " + b"b" * 70_000, "headers of"),
        (b"HTTP/1.1 101 Switching Protocols\r\n\r\n", "status 101"),
        (b"HTTP/1.1 100 Continue\r\n\r\n" * 20, "status 100"),
    ],
)
def test_a_broken_answer_is_a_transport_error_that_says_what_is_wrong(monkeypatch, reply, words):
    monkeypatch.setattr(connection, "BODY_BYTES_MAX", 2_000)

    async def main():
        async with client_of(says(reply)) as (server, client):
            with pytest.raises(TransportError, match=words) as failure:
                await post(client, b"x")
            assert failure.value.maybe_sent
            await server.all_gone()

    run(main)


def test_unexpected_bytes_close_an_idle_connection():
    async def main():
        answered = asyncio.Event()

        async def conversation(reader, writer):
            await read_request(reader)
            writer.write(answer(b"ok"))
            await answered.wait()
            writer.write(b"HTTP/1.1 408 Request Timeout\r\n\r\n")
            await reader.read()

        async with client_of(conversation) as (server, client):
            await post(client, b"x")
            answered.set()
            await server.all_gone()
            answered.clear()
            assert await post(client, b"x") == (200, b"ok")
            answered.set()

    run(main)


def test_idle_connections_are_closed_after_their_time():
    async def main():
        async with client_of(echo, timeouts=ClientTimeouts(idle=0.05)) as (server, client):
            await asyncio.gather(*(post(client, b"x") for _ in range(4)))
            await server.all_gone()

    run(main)


def test_closing_ends_calls_under_way_and_refuses_new_ones():
    async def main():
        asked = asyncio.Event()

        async def conversation(reader, writer):
            await read_request(reader)
            asked.set()
            await reader.read()

        async with client_of(conversation, connections_max=1) as (server, client):
            calls = [asyncio.ensure_future(post(client, b"x")) for _ in range(2)]
            await asked.wait()
            await client.close()
            results = await asyncio.gather(*calls, return_exceptions=True)
            assert all(isinstance(result, TransportError) for result in results)
            await server.all_gone()
            with pytest.raises(UsageError, match="closed"):
                await post(client, b"x")

    run(main)


def test_an_error_in_the_reader_of_an_answer_keeps_the_connection():
    async def main():
        async with client_of(echo) as (server, client):

            def refuse(response):
                raise ValueError("no")

            for _ in range(2):
                with pytest.raises(ValueError, match="no"):
                    await client.post("reads", b"content-length: 1\r\n\r\n", [b"x"], refuse, repeatable=True)
            assert server.connections == 1

    run(main)


def test_a_caller_cancelled_in_the_moment_of_its_turn_passes_the_connection_on():
    async def main():
        async with client_of(echo, connections_max=1) as (server, client):
            pool = client._pools["reads"]
            deadline = asyncio.get_running_loop().time() + 10
            held = await pool.acquire(deadline)
            first = asyncio.ensure_future(pool.acquire(deadline))
            second = asyncio.ensure_future(pool.acquire(deadline))
            await asyncio.sleep(0)
            await held.exchange(b"POST / HTTP/1.1\r\ncontent-length: 0\r\n\r\n", [], deadline)
            pool.release(held)  # it is the first waiter's turn now, but that has not run yet
            first.cancel()
            with pytest.raises(asyncio.CancelledError):
                await first
            assert await second is held
            pool.release(held)  # without an answer, so it is closed
            third = asyncio.ensure_future(pool.acquire(deadline))
            fourth = asyncio.ensure_future(pool.acquire(deadline))
            dialled = await third
            pool.release(dialled)  # the turn goes to the fourth, which gives it up
            fourth.cancel()
            with pytest.raises(asyncio.CancelledError):
                await fourth
            assert pool._free_turns == 1
            assert not pool._idle
            assert not pool._busy
            await server.all_gone()

    run(main)


def test_a_connection_lost_in_the_middle_of_a_large_request_is_an_error():
    async def main():
        async def conversation(reader, writer):
            await reader.readexactly(100_000)

        async with client_of(conversation) as (_, client):
            with pytest.raises(TransportError) as failure:
                await post(client, *[b"x" * 65_536] * 500, repeatable=False)
            assert failure.value.maybe_sent

    run(main)


def test_cancelling_a_large_request_closes_its_connection():
    async def main():
        begun = asyncio.Event()

        async def conversation(reader, writer):
            await reader.readexactly(1_000)
            begun.set()
            writer.transport.pause_reading()
            await asyncio.sleep(0.05)
            writer.transport.resume_reading()
            await reader.read()

        async with client_of(conversation) as (_, client):
            call = asyncio.ensure_future(post(client, *[b"x" * 65_536] * 2_000))
            await begun.wait()
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call

    run(main)
