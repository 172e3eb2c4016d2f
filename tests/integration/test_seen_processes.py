"""Real processes, sockets and files: a stuck handler and a killed worker are seen from outside, with a true lag.

The table of all troubles, in virtual time, is in `tests/simulation/test_seen_troubles.py`.
"""

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request

import pytest

from anabranch.testing.doubles import run_local_kinesis
from patience import PATIENCE, wait_for

from services import free_port

pytestmark = pytest.mark.long

MODULE = """
import asyncio
import pathlib

import anabranch
from anabranch import ConsumerSettings, LeaseSettings, PollingSettings

SETTINGS = ConsumerSettings(
    leases=LeaseSettings(expiry=3.0, drain_deadline=1.0),
    polling=PollingSettings(idle_interval=0.2),
    health_host="127.0.0.1",
)
consumer = anabranch.Consumer("orders", app="billing", settings=SETTINGS)


@consumer.handler
async def handle(record):
    while record.data == b"stuck" and not pathlib.Path("go").exists():
        await asyncio.sleep(0.1)
"""


class Fleet:
    def __init__(self, folder, kinesis):
        self.folder = folder
        self.environment = {**os.environ, **kinesis.environment(), "XDG_STATE_HOME": str(folder)}
        self.processes = []

    def program(self, *arguments):
        done = subprocess.run(
            [sys.executable, "-m", "anabranch", *arguments],
            cwd=self.folder, env=self.environment, capture_output=True, text=True, check=True,
        )  # fmt: skip
        return done.stdout

    def start(self, name, port):
        command = ["run", "app:consumer", "--log-format", "json", "--health-port", str(port)]
        with (self.folder / f"{name}.log").open("w") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "anabranch", *command], cwd=self.folder, env=self.environment, stderr=log
            )
        self.processes.append(process)
        wait_for(lambda: self.logged(name, "ConsumerStarted"), f"{name} to start")
        return process

    def logged(self, name, event):
        lines = (self.folder / f"{name}.log").read_text().splitlines()
        return [line for line in map(json.loads, lines) if line.get("event") == event]

    def end(self):
        for process in self.processes:
            process.kill()
            process.wait()


def served(port):
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/status.json", timeout=PATIENCE) as answer:
        return json.load(answer)[0]["status"]["shards"]


def test_a_stuck_handler_and_a_killed_worker_are_seen_in_every_place(tmp_path):
    (tmp_path / "app.py").write_text(MODULE)
    with run_local_kinesis(create={"orders": 1}) as kinesis:
        fleet = Fleet(tmp_path, kinesis)
        try:
            port, other_port, last_port = free_port(), free_port(), free_port()
            first = fleet.start("first", port)
            wait_for(lambda: served(port), "a shard")
            put_at = time.time()
            fleet.program("put", "orders", "stuck", "--key", "k")
            wait_for(lambda: fleet.logged("first", "ShardStalled"), "the stall")
            check_what_is_seen(fleet, port, put_at)

            second = fleet.start("second", other_port)
            first.send_signal(signal.SIGKILL)
            wait_for(lambda: fleet.logged("second", "MemberEvicted"), "the other worker to notice")
            wait_for(lambda: fleet.logged("second", "ShardStalled"), "the stall there")
            check_what_is_seen(fleet, other_port, put_at)

            second.kill()
            second.wait()
            check_what_is_seen_of_dead_workers(fleet, put_at)

            third = fleet.start("third", last_port)
            wait_for(lambda: fleet.logged("third", "MemberEvicted"), "the last worker to notice")
            wait_for(lambda: fleet.logged("third", "ShardStalled"), "the stall there")
            (tmp_path / "go").touch()
            over = wait_for(lambda: fleet.logged("third", "ShardRecovered"), "the end of it")
            assert "reading again after" in over[0]["message"]
            wait_for(lambda: served(last_port)[0]["lag"] == 0, "no lag")
            assert "It is at the tip." in fleet.program("explain", "billing")
            third.send_signal(signal.SIGTERM)
            assert third.wait(PATIENCE) == 0
            (stopped,) = fleet.logged("third", "ConsumerStopped")
            assert (stopped["handled_count"], stopped["committed_count"]) == (1, 1)
        finally:
            fleet.end()


def check_what_is_seen(fleet, port, put_at):
    """A record that stalls its shard is ten seconds old at least, and not older than the time since it was put. Workers
    know the service's clock to a second.
    """
    (shard,) = served(port)
    assert shard["reason"]["code"] == "record-in-handler"
    assert 9 <= shard["lag"] < time.time() - put_at + 2
    status = json.loads(fleet.program("apps", "show", "billing", "--json"))
    (seen,) = status["shards"]
    assert (seen["state"], seen["reason"]["code"]) == ("stalled", "record-in-handler")
    assert 9 <= seen["lag"] < time.time() - put_at + 2
    shown = fleet.program("top", "billing", "--once")
    assert "1 stalled" in shown
    assert "is still being handled after" in " ".join(shown.split())
    explained = " ".join(fleet.program("explain", "billing").split())
    assert "behind" in explained
    assert "is still being handled after" in explained
    assert "-> check that record's handler" in explained


def check_what_is_seen_of_dead_workers(fleet, put_at):
    """By somebody who did not look before: no process is left to ask."""
    status = json.loads(fleet.program("apps", "show", "billing", "--json"))
    (seen,) = status["shards"]
    assert (seen["state"], seen["reason"]["code"]) == ("orphaned", "worker-dead")
    assert 9 <= seen["lag"] < time.time() - put_at + 2
    shown = " ".join(fleet.program("top", "billing", "--once").split())
    assert "1 stalled; " in shown
    assert "s behind" in shown
    assert "orphaned" in shown
    explained = " ".join(fleet.program("explain", "billing").split())
    assert "behind" in explained
    assert "is gone: it did not shut down cleanly" in explained
    scale = json.loads(fleet.program("apps", "scale", "billing", "--json"))
    assert scale["lag"] >= seen["lag"]
