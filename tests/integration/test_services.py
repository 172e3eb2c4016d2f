"""The server of `make services` starts for a test, answers on loopback and stops with it."""

import socket
from urllib.parse import urlsplit

import pytest

from services import redis_server

pytestmark = pytest.mark.services


def test_redis_starts_answers_and_ends_with_the_test(tmp_path):
    with redis_server(tmp_path) as url:
        address = urlsplit(url)
        with socket.create_connection((address.hostname, address.port), timeout=5) as connection:
            connection.sendall(b"PING\r\n")
            assert connection.recv(64) == b"+PONG\r\n"
    with pytest.raises(OSError):
        socket.create_connection((address.hostname, address.port), timeout=1)
