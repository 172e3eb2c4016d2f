"""The command line against a local Kinesis: most commands in this process, since starting Python is what takes time."""

import asyncio
import json
import os
import subprocess
import sys
import threading
from dataclasses import dataclass

import msgspec
import pytest

from anabranch._cli.command_line import main
from anabranch.local import LocalKinesis
from patience import PATIENCE

PROGRAM = (sys.executable, "-m", "anabranch")


@dataclass(frozen=True)
class Ended:
    code: int
    out: str
    err: str

    @property
    def json(self):
        return json.loads(self.out)


class ServerThread:
    """A local Kinesis in a thread of its own, so that blocking commands can use it."""

    def __init__(self, state_delay=0.0):
        self._state_delay = state_delay
        self._started = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._main()), daemon=True)
        self._thread.start()
        assert self._started.wait(20), "the local Kinesis did not start"

    async def _main(self):
        self._loop = asyncio.get_running_loop()
        self._stop = asyncio.Event()
        streams = {"orders": 2, "returns": 1}
        async with LocalKinesis(create=streams, state_delay=self._state_delay) as self.local:
            self._started.set()
            await self._stop.wait()

    def call(self, operation, **request):
        """A call without HTTP, in the server's own loop."""
        return self.run(self._call(operation, request))

    async def _call(self, operation, request):
        return self.local.state.call(operation, request, now_ms=self.local._now_ms())

    def run(self, coroutine):
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(PATIENCE)

    def freeze(self):
        """From now on no change is ever finished."""
        account = self.local.state.account
        account.settings = msgspec.structs.replace(account.settings, state_delay_ms=3_600_000)

    def status(self, stream):
        return self.call("DescribeStreamSummary", StreamName=stream)["StreamDescriptionSummary"]["StreamStatus"]

    def open_shard_ids(self, stream="orders"):
        listed = self.call("ListShards", StreamName=stream, ShardFilter={"Type": "AT_LATEST"})["Shards"]
        return [shard["ShardId"] for shard in listed]

    def close(self):
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(20)


@pytest.fixture(scope="session")
def server_thread():
    server = ServerThread()
    yield server
    server.close()


@pytest.fixture
def lead_to(monkeypatch):
    """Makes the environment lead to a server."""

    def lead(server):
        for name, value in server.local.environment().items():
            monkeypatch.setenv(name, value)
        return server

    return lead


@pytest.fixture
def server(server_thread, lead_to):
    """With the streams `orders` of two shards and `returns` of one; every change is made at once."""
    server_thread.run(server_thread.local.reset())
    return lead_to(server_thread)


@pytest.fixture
def slow_server(lead_to):
    """Changes take their time."""
    server = ServerThread(state_delay=0.3)
    yield lead_to(server)
    server.close()


@pytest.fixture
def frozen_server(lead_to):
    """No change is ever finished."""
    server = ServerThread(state_delay=3600)
    yield lead_to(server)
    server.close()


@pytest.fixture
def cli(capsys):
    """Runs a command in this process."""

    def run(*arguments):
        capsys.readouterr()
        try:
            code = main(arguments)
        except SystemExit as left:  # argparse's way
            code = left.code
        out, err = capsys.readouterr()
        return Ended(code, out, err)

    return run


@pytest.fixture
def program():
    """Runs the installed program, as a process."""

    def run(*arguments, **options):
        environment = {**os.environ, "COLUMNS": "80", **options.pop("environment", {})}
        ended = subprocess.run(
            [*PROGRAM, *arguments],
            capture_output=True,
            text=True,
            timeout=PATIENCE,
            check=False,
            env=environment,
            **options,
        )
        return Ended(ended.returncode, ended.stdout, ended.stderr)

    return run
