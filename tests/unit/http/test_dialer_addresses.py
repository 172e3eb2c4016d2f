import asyncio
import socket

import pytest
from blockbuster import blockbuster_ctx

from anabranch._http.client import dialer
from anabranch._http.client.dialer import connect_to_host


class Network:
    """getaddrinfo and sock_connect as a script: what each address does when it is tried."""

    def __init__(self, monkeypatch, behaviour):
        self.tried = []
        self.sockets = []
        self._behaviour = behaviour
        self._monkeypatch = monkeypatch
        real = socket.socket

        def remembered(*arguments, **options):
            made = real(*arguments, **options)
            if made.family in {socket.AF_INET, socket.AF_INET6}:  # the event loop has a pair of its own
                self.sockets.append(made)
            return made

        monkeypatch.setattr(dialer.socket, "socket", remembered)

    def install(self):
        loop = asyncio.get_running_loop()

        async def getaddrinfo(host, port, **options):
            return [
                (socket.AF_INET6 if ":" in name else socket.AF_INET, socket.SOCK_STREAM, 6, "", (name, port))
                for name in self._behaviour
            ]

        async def sock_connect(sock, where):
            self.tried.append(where[0])
            await self._behaviour[where[0]]()

        self._monkeypatch.setattr(loop, "getaddrinfo", getaddrinfo, raising=False)
        self._monkeypatch.setattr(loop, "sock_connect", sock_connect, raising=False)

    def open_sockets(self):
        return [one for one in self.sockets if one.fileno() >= 0]


async def answers():
    await asyncio.sleep(0)


async def hangs():
    await asyncio.Event().wait()


async def refuses():
    raise ConnectionRefusedError("refused")


async def is_unreachable():
    raise OSError("no route")


def connect(monkeypatch, behaviour, *, cancel_after=None):
    network = Network(monkeypatch, behaviour)
    monkeypatch.setattr(dialer, "_ATTEMPT_DELAY_SECONDS", 0.01)

    async def main():
        network.install()
        async with asyncio.timeout(cancel_after or 10):
            with blockbuster_ctx("anabranch"), await connect_to_host("host", 1):
                assert len(network.open_sockets()) == 1

    try:
        asyncio.run(main())
    finally:
        assert network.open_sockets() == []
    return network.tried


def test_the_first_address_that_answers_is_taken(monkeypatch):
    assert connect(monkeypatch, {"10.0.0.1": answers, "10.0.0.2": answers}) == ["10.0.0.1"]


def test_a_refusal_turns_to_the_next_at_once_and_families_take_turns(monkeypatch):
    behaviour = {"fd00::1": refuses, "fd00::2": refuses, "10.0.0.1": refuses, "10.0.0.2": answers}
    assert connect(monkeypatch, behaviour) == ["fd00::1", "10.0.0.1", "fd00::2", "10.0.0.2"]


def test_a_slow_address_is_not_waited_for(monkeypatch):
    assert connect(monkeypatch, {"fd00::1": hangs, "10.0.0.1": answers}) == ["fd00::1", "10.0.0.1"]


def test_a_slow_address_may_still_win(monkeypatch):
    async def late():
        await asyncio.sleep(0.05)

    assert connect(monkeypatch, {"10.0.0.1": late, "10.0.0.2": refuses}) == ["10.0.0.1", "10.0.0.2"]


def test_failures_of_one_kind_are_that_failure_and_others_are_reported_together(monkeypatch):
    with pytest.raises(ConnectionRefusedError):
        connect(monkeypatch, {"10.0.0.1": refuses, "10.0.0.2": refuses})
    with pytest.raises(OSError, match="refused; no route"):
        connect(monkeypatch, {"10.0.0.1": refuses, "10.0.0.2": is_unreachable})


def test_cancelling_closes_every_socket(monkeypatch):
    with pytest.raises(TimeoutError):
        connect(monkeypatch, {"10.0.0.1": hangs, "10.0.0.2": hangs}, cancel_after=0.1)


def test_two_that_answer_at_once_leave_one_socket(monkeypatch):
    async def soon():
        await asyncio.sleep(0.02)

    connect(monkeypatch, {"10.0.0.1": soon, "10.0.0.2": answers, "10.0.0.3": answers})
