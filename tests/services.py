"""Real servers for the tests: started on a free loopback port in a directory of their own, stopped by process id.

A server that is not installed skips the test by name with what to do; under CI=true that is a failure.
"""

import contextlib
import os
import pwd
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

START_SECONDS_MAX = 30.0


def find_program(name: str, *elsewhere: str) -> str | None:
    found = shutil.which(name)
    if found:
        return found
    candidates = [path for pattern in elsewhere for path in Path("/").glob(pattern.lstrip("/"))]
    return str(max(candidates)) if candidates else None


def require_program(name: str, *elsewhere: str) -> str:
    program = find_program(name, *elsewhere)
    if program is None:
        message = f"{name} is not installed: run `make services`"
        if os.environ.get("CI") == "true":
            pytest.fail(message)
        pytest.skip(message)
    return program


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _wait_for_port(port: int, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + START_SECONDS_MAX
    while time.monotonic() < deadline:
        if process.poll() is not None:
            output = process.stdout.read().decode() if process.stdout else ""
            raise RuntimeError(f"{process.args} ended with {process.returncode}: {output}")
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
            return
        time.sleep(0.02)
    raise TimeoutError(f"{process.args} did not listen on port {port} within {START_SECONDS_MAX:.0f} s")


@contextlib.contextmanager
def _running(command: list[str], port: int, *, user: str | None = None) -> Iterator[None]:
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, user=user)
    try:
        _wait_for_port(port, process)
        yield
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        if process.stdout:
            process.stdout.close()


@contextlib.contextmanager
def redis_server(directory: Path) -> Iterator[str]:
    """A Redis that keeps its writes (appendonly); yields its URL."""
    program, port = require_program("redis-server"), free_port()
    command = [
        program, "--port", str(port), "--bind", "127.0.0.1", "--dir", str(directory),
        "--appendonly", "yes", "--save", "", "--maxmemory-policy", "noeviction",
    ]  # fmt: skip
    with _running(command, port):
        yield f"redis://127.0.0.1:{port}/0"


@contextlib.contextmanager
def postgresql_server(directory: Path) -> Iterator[str]:
    """A PostgreSQL cluster of its own; yields its URL. It refuses to run as root, so root lends it another user."""
    postgres = require_program("postgres", "/usr/lib/postgresql/*/bin/postgres")
    initdb = str(Path(postgres).with_name("initdb"))
    user = "nobody" if os.geteuid() == 0 else None
    data, port = directory / "data", free_port()
    data.mkdir(mode=0o700)
    if user is not None:
        for place in (directory, *directory.parents):
            if not place.stat().st_mode & 0o001 and place.owner() == "root" and place != Path("/"):
                place.chmod(place.stat().st_mode | 0o011)
        shutil.chown(data, user, pwd.getpwnam(user).pw_gid)
    subprocess.run(
        [initdb, "-D", str(data), "-U", "anabranch", "-A", "trust", "--no-sync"],
        check=True, user=user, stdout=subprocess.DEVNULL, cwd="/",
    )  # fmt: skip
    command = [
        postgres, "-D", str(data), "-p", str(port), "-c", "listen_addresses=127.0.0.1",
        "-c", "unix_socket_directories=", "-c", "fsync=off",
    ]  # fmt: skip
    with _running(command, port, user=user):
        yield f"postgresql://anabranch@127.0.0.1:{port}/postgres"
