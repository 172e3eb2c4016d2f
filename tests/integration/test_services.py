"""The server of `make services` starts for a test, answers on loopback and stops with it."""

import socket

import pytest

from patience import PATIENCE

from services import RedisServerProcess

pytestmark = pytest.mark.services


def test_redis_starts_answers_and_ends_with_the_test(tmp_path):
    with RedisServerProcess(tmp_path) as server:
        address = ("127.0.0.1", server.port)
        with socket.create_connection(address, timeout=PATIENCE) as connection:
            connection.sendall(b"PING\r\n")
            assert connection.recv(64) == b"+PONG\r\n"
    with pytest.raises(OSError):
        socket.create_connection(address, timeout=1)
