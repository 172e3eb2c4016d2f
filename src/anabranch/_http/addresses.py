"""The first of a host's addresses that answers (RFC 8305, "happy eyeballs"): the next is tried beside a slow one.

asyncio can race addresses too, but forgets the socket that has just won when it is cancelled in that moment. Here
every socket has one owner from its first to its last moment.
"""

import asyncio
import socket
from asyncio import FIRST_COMPLETED
from collections.abc import Sequence
from itertools import chain, zip_longest
from typing import Any, Final

__all__ = ["connect_to_host"]

_NEXT_AFTER_SECONDS: Final = 0.25

AddressInfo = tuple[socket.AddressFamily, socket.SocketKind, int, str, Any]


async def connect_to_host(host: str, port: int) -> socket.socket:
    """A connected socket, which belongs to the caller. Raises OSError: of the only attempt, or a summary of them."""
    loop = asyncio.get_running_loop()
    addresses = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    sockets: list[socket.socket] = []
    failures: list[OSError] = []
    connected: asyncio.Future[Any] = loop.create_future()  # of a socket

    async def attempt(address: AddressInfo) -> None:
        family, kind, protocol, _, where = address
        try:
            attempted = socket.socket(family, kind, protocol)
            sockets.append(attempted)
            attempted.setblocking(False)
            await loop.sock_connect(attempted, where)
        except OSError as error:
            failures.append(error)
        else:
            if not connected.done():
                connected.set_result(attempted)

    try:
        async with asyncio.TaskGroup() as group:
            attempts: list[asyncio.Future[Any]] = []
            for address in _interleaved(addresses):
                attempts.append(group.create_task(attempt(address)))
                await asyncio.wait([attempts[-1], connected], timeout=_NEXT_AFTER_SECONDS, return_when=FIRST_COMPLETED)
                if connected.done():
                    break
            while not connected.done() and (unfinished := [one for one in attempts if not one.done()]):
                await asyncio.wait([*unfinished, connected], return_when=FIRST_COMPLETED)
            for one in attempts:
                one.cancel()
        if connected.done():
            winner: socket.socket = connected.result()
            sockets.remove(winner)
            return winner
    finally:
        for left_over in sockets:
            left_over.close()
    if len({type(failure) for failure in failures}) == 1:
        raise failures[0]
    raise OSError("; ".join(str(failure) for failure in failures))


def _interleaved(addresses: Sequence[AddressInfo]) -> list[AddressInfo]:
    """The two families in turn, beginning with the one that the system prefers."""
    first = [address for address in addresses if address[0] == addresses[0][0]]
    others = [address for address in addresses if address[0] != addresses[0][0]]
    return [address for address in chain.from_iterable(zip_longest(first, others)) if address is not None]
