"""Real servers for the tests: started on a free loopback port in a directory of their own, stopped by process id.

If a server is not installed, the test is skipped with a message that says what to do; under CI=true it fails.
"""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

START_SECONDS_MAX = 30.0


def require_program(name: str) -> str:
    program = shutil.which(name)
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
def _running(command: list[str], port: int) -> Iterator[None]:
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
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
