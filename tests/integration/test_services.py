"""The servers of `make services` start for a test, answer on loopback and end with it."""

import socket
from urllib.parse import urlsplit

import pytest

from services import postgresql_server, redis_server

pytestmark = pytest.mark.services


def test_redis_starts_answers_and_ends_with_the_test(tmp_path):
    with redis_server(tmp_path) as url:
        address = urlsplit(url)
        with socket.create_connection((address.hostname, address.port), timeout=5) as connection:
            connection.sendall(b"PING\r\n")
            assert connection.recv(64) == b"+PONG\r\n"
    with pytest.raises(OSError):
        socket.create_connection((address.hostname, address.port), timeout=1)


def test_postgresql_starts_as_an_unprivileged_user_and_ends_with_the_test(tmp_path):
    with postgresql_server(tmp_path) as url:
        address = urlsplit(url)
        with socket.create_connection((address.hostname, address.port), timeout=5) as connection:
            connection.sendall(b"\x00\x00\x00\x08\x04\xd2\x16\x2f")  # SSLRequest: answered by S or N, by nothing else
            assert connection.recv(1) in {b"S", b"N"}
    with pytest.raises(OSError):
        socket.create_connection((address.hostname, address.port), timeout=1)
