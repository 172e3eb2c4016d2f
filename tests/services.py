"""Real servers for the tests: started on a free loopback port in a directory of their own, stopped by process id.

If a server is not installed, the test is skipped with a message that says what to do; under CI=true it fails.
"""

import contextlib
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

import pytest

START_SECONDS_MAX = 60.0
DYNAMODB_LOCAL = Path(__file__).parent.parent / ".services" / "dynamodb-local"


def require_program(name: str) -> str:
    program = shutil.which(name)
    if program is None:
        _is_missing(name)
    assert program is not None
    return program


def require_promtool() -> str:
    """Prometheus's own checker of rules."""
    fetched = Path(__file__).parent.parent / ".services" / "promtool"
    return str(fetched) if fetched.exists() else require_program("promtool")


def _is_missing(what: str) -> None:
    message = f"{what} is not installed: run `make services`"
    if os.environ.get("CI") == "true":
        pytest.fail(message)
    pytest.skip(message)


def free_port() -> int:
    """Below the ports that the kernel gives to clients: one of those could be taken before the server has started."""
    while True:
        port = 10_000 + secrets.randbelow(20_000)
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind(("127.0.0.1", port))
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


class ServerProcess:
    """A server on a loopback port, which can be killed, started again on the same port and files, and stopped."""

    def __init__(self, command: list[str], port: int) -> None:
        self.port = port
        self._command = command
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        self._process = subprocess.Popen(self._command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        _wait_for_port(self.port, self._process)

    def kill(self) -> None:
        if (process := self._process) is not None:
            process.kill()
            process.wait()
            if process.stdout:
                process.stdout.close()
        self._process = None

    @contextlib.contextmanager
    def stopped(self) -> Iterator[None]:
        """It accepts connections and answers nothing."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self._process.send_signal(signal.SIGCONT)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()


class RedisServerProcess(ServerProcess):
    """A Redis that keeps its writes (appendonly), in a directory of its own. `settings` are those of redis.conf."""

    def __init__(self, directory: Path, *settings: str) -> None:
        program, port = require_program("redis-server"), free_port()
        directory.mkdir(exist_ok=True)
        self.directory = directory
        kept = ["--appendonly", "yes", "--save", "", "--maxmemory-policy", "noeviction", "--loglevel", "warning"]
        super().__init__(
            [program, "--port", str(port), "--bind", "127.0.0.1", "--dir", str(directory), *kept, *settings], port
        )

    def leases(self, options: str = "", user: str = "", port: int | None = None) -> str:
        return f"redis://{user}127.0.0.1:{port or self.port}/0{options}"

    def call(self, *command: str) -> Any:
        """One command, as an administrator."""
        import redis

        with contextlib.closing(redis.Redis(port=self.port, decode_responses=True)) as client:
            return client.execute_command(*command)

    def forget(self) -> None:
        """Removes its files."""
        shutil.rmtree(self.directory)
        self.directory.mkdir()

    def wait_for_replicas(self, count: int = 1) -> None:
        deadline = time.monotonic() + START_SECONDS_MAX
        while str(self.call("INFO", "replication")).count("'state': 'online'") < count:
            if time.monotonic() > deadline:
                raise TimeoutError("the replicas did not connect")
            time.sleep(0.02)


@contextlib.contextmanager
def redis_pair(directory: Path) -> Iterator[tuple[RedisServerProcess, RedisServerProcess]]:
    """A primary and its replica, which has what the primary has."""
    with RedisServerProcess(directory / "primary") as primary:
        primary.call("CONFIG", "SET", "repl-diskless-sync-delay", "0")
        replica = RedisServerProcess(directory / "replica", "--replicaof", "127.0.0.1", str(primary.port))
        with replica:
            primary.wait_for_replicas()
            yield primary, replica


class MotoServer(ServerProcess):
    """moto's DynamoDB and S3, in memory and behind one lock."""

    def __init__(self, *options: str) -> None:
        port = free_port()
        super().__init__([sys.executable, str(Path(__file__).with_name("moto_server.py")), str(port), *options], port)

    def s3_client(self) -> Any:
        return _boto3_client("s3", self.url)

    def make_bucket(self, name: str) -> None:
        self.s3_client().create_bucket(Bucket=name, CreateBucketConfiguration={"LocationConstraint": "eu-west-1"})

    def leases(self, place: str, port: int | None = None) -> str:
        return f"s3://{place}?endpoint=http://127.0.0.1:{port or self.port}&region=eu-west-1"


def _boto3_client(service: str, url: str) -> Any:
    import boto3

    return boto3.client(
        service, region_name="eu-west-1", endpoint_url=url, aws_access_key_id="x", aws_secret_access_key="y"
    )


class DynamoDbServer(ServerProcess):
    def leases(self, table: str = "", port: int | None = None) -> str:
        return f"dynamodb://{table}?endpoint=http://127.0.0.1:{port or self.port}&region=eu-west-1"

    def boto3_client(self) -> Any:
        return _boto3_client("dynamodb", self.url)


def dynamodb_local(directory: Path) -> DynamoDbServer:
    """AWS's DynamoDB Local, which keeps its rows in a file of the directory. It knows no tags and no recovery."""
    java = require_program("java")
    if not (DYNAMODB_LOCAL / "DynamoDBLocal.jar").exists():
        _is_missing("DynamoDB Local")
    directory.mkdir(exist_ok=True)
    port = free_port()
    libraries = f"-Djava.library.path={DYNAMODB_LOCAL / 'DynamoDBLocal_lib'}"
    jar = str(DYNAMODB_LOCAL / "DynamoDBLocal.jar")
    files = ["-dbPath", str(directory), "-sharedDb", "-disableTelemetry"]
    return DynamoDbServer([java, "-Xmx512m", libraries, "-jar", jar, "-port", str(port), *files], port)


def moto_dynamodb() -> DynamoDbServer:
    """moto's, in memory and behind one lock."""
    port = free_port()
    return DynamoDbServer([sys.executable, str(Path(__file__).with_name("moto_server.py")), str(port)], port)
