"""Handlers in processes: they load, fail, time out, die and log there. Processes whose calls never end still exit."""

import asyncio
import importlib
import logging
import os
import subprocess
import sys

import pytest

from anabranch import Retry, events
from anabranch.errors import ShardStoppedError
from anabranch.testing.doubles import run_local_kinesis
from patience import PATIENCE
from process_handlers import (
    InModule,
    die_or_write,
    exit_or_return_a_lock,
    failing,
    process_id_of,
    wait_for_file,
)

from stream_world import run, stream_world, until


def consume(handler, **retry):
    """What happened to one record, and the report."""
    happened, reports = [], []

    async def main():
        async with stream_world(1) as world:
            world.put("a")
            consumer = world.consumer(
                app="billing", leases="memory://", until="tip", on_event=happened.append, on_failure=Retry(**retry)
            )
            try:
                reports.append(await consumer.run(handler, processes=1))
            except ShardStoppedError as error:
                reports.append(error.report)

    run(main)
    return happened, reports[0]


def test_loading_a_handler_uses_up_no_calls_time(tmp_path, monkeypatch):
    handled = tmp_path / "handled"
    (tmp_path / "slow_to_load.py").write_text(
        f"import time\ntime.sleep(1.5)\ndef handle(record):\n    open({str(handled)!r}, 'ab').write(record.data)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    happened, report = consume(InModule("slow_to_load"), attempts=1, timeout=0.5)
    assert report.clean
    assert handled.read_bytes() == b"0"
    assert not [event for event in happened if isinstance(event, events.HandlerFailed)]


def test_a_batch_handler_in_a_process_can_say_which_records_failed(tmp_path, monkeypatch):
    handled = tmp_path / "handled"
    (tmp_path / "batches.py").write_text(
        "import anabranch, os\n"
        "def handle(batch):\n"
        f"    first = not os.path.exists({str(handled)!r})\n"
        f"    with open({str(handled)!r}, 'a') as file:\n"
        "        print(*(int(record.data) for record in batch), file=file)\n"
        "    if first:\n"
        "        raise anabranch.BatchFailure(failed=batch.records[2:])\n"
    )
    monkeypatch.syspath_prepend(tmp_path)

    async def main():
        async with stream_world(1) as world:
            world.put("aaaa")
            consumer = world.consumer(app="billing", leases="memory://", until="tip", on_failure=Retry(backoff=0.01))
            assert (await consumer.run_batches(InModule("batches"), max_wait=0.1, processes=1)).clean

    run(main)
    assert handled.read_text().splitlines() == ["0 1 2 3", "2 3"]


@pytest.mark.parametrize(
    "text, cause",
    [
        ("import no_such_module", "ModuleNotFoundError: No module named 'no_such_module'"),
        ("raise SystemExit('not here')", "SystemExit: not here"),
    ],
)
def test_a_handler_that_cannot_be_loaded_fails_its_record_with_the_cause(tmp_path, monkeypatch, text, cause):
    (tmp_path / "fails_to_load.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    happened, _ = consume(InModule("fails_to_load"), attempts=2, backoff=0.01, timeout=5)
    failed = [event.error for event in happened if isinstance(event, events.HandlerFailed)]
    assert failed == [f"RuntimeError: the handler could not be loaded in a new process: {cause}"] * 2
    (stop,) = [event for event in happened if isinstance(event, events.ShardStopped)]
    assert cause in str(stop.reason)


@pytest.mark.parametrize(
    "raised, calls, error",
    [
        ("Odd('no', 'customer')", 1, "Odd: no customer"),
        ("Locked('no', 'customer')", 2, "RuntimeError: the handler raised Locked: no customer"),
    ],
)
def test_an_error_that_does_not_unpickle_is_still_told_and_given_up_on(tmp_path, monkeypatch, raised, calls, error):
    (tmp_path / "odd_errors.py").write_text(
        "import threading\n"
        "class Odd(Exception):\n"
        "    def __init__(self, what, which):\n"
        "        super().__init__(what)\n"
        "        self.which = which\n"
        "    def __str__(self):\n"
        "        return f'{self.args[0]} {self.which}'\n"
        "class Locked(Odd):\n"
        "    def __init__(self, what, which):\n"
        "        super().__init__(what, which)\n"
        "        self.lock = threading.Lock()\n"
        "def handle(record):\n"
        f"    raise {raised}\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "odd_errors", raising=False)
    odd = importlib.import_module("odd_errors").Odd
    happened, _ = consume(InModule("odd_errors"), attempts=2, backoff=0.01, give_up_on=(odd,))
    assert [event.error for event in happened if isinstance(event, events.HandlerFailed)] == [error] * calls


def test_a_call_that_takes_too_long_is_ended_with_its_process(tmp_path, monkeypatch):
    (tmp_path / "sleeps_at_first.py").write_text(
        "import pathlib, time\n"
        "def handle(record):\n"
        f"    path = pathlib.Path({str(tmp_path / 'called')!r})\n"
        "    if not path.exists():\n"
        "        path.touch()\n"
        "        time.sleep(600)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    happened, report = consume(InModule("sleeps_at_first"), attempts=2, backoff=0.01, timeout=1)
    assert report.clean
    (failed,) = [event for event in happened if isinstance(event, events.HandlerFailed)]
    assert failed.error.startswith("TimeoutError")


ZOMBIE = """
import asyncio, dataclasses, sys, time
from anabranch.errors import LeaseStoreError
from anabranch.stores.memory import MemoryLeaseStore
from stream_world import QUICK, stream_world

class AwayStore(MemoryLeaseStore):
    async def heartbeat(self, beat):
        raise LeaseStoreError("away")

async def main():
    settings = dataclasses.replace(QUICK, leases=dataclasses.replace(QUICK.leases, on_zombie="exit"))
    async with stream_world(1) as world:
        world.put(["a"])
        consumer = world.consumer(app="billing", leases=AwayStore(), settings=settings)
        await consumer.run(globals()[sys.argv[1]])

async def in_the_loop(record):
    time.sleep(60)

def in_a_thread(record):
    time.sleep(60)

asyncio.run(main())
"""


@pytest.mark.parametrize("kind", [pytest.param("in_the_loop", marks=pytest.mark.long), "in_a_thread"])
def test_a_process_whose_call_outlives_its_lease_can_be_made_to_exit(kind):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    ended = subprocess.run(
        [sys.executable, "-c", ZOMBIE, kind],
        env=environment,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert ended.returncode == 70, ended.stderr
    assert "outlived its lease" in ended.stderr


KEYS = [f"user-{i}" for i in range(8)]


def test_a_script_without_a_main_guard_starts_no_second_consumer_in_a_handler_process(tmp_path):
    (tmp_path / "script.py").write_text(
        "import anabranch\n"
        "def handle(record): pass\n"
        "policy = anabranch.Retry(attempts=1)\n"
        "consumer = anabranch.Consumer('orders', app='billing', until='tip', on_failure=policy)\n"
        "consumer.run_sync(handle, processes=1)\n"
    )
    with run_local_kinesis(create={"orders": 1}) as kinesis:
        environment = {**os.environ, **kinesis.environment(), "ANABRANCH_LEASES": f"sqlite://{tmp_path}/leases.db"}
        cli = [sys.executable, "-m", "anabranch", "put", "orders", "x", "--key", "a"]
        subprocess.run(cli, check=True, env=environment, capture_output=True)
        ended = subprocess.run(
            [sys.executable, "script.py"], check=False, cwd=tmp_path, env=environment, capture_output=True, text=True,
            timeout=PATIENCE,
        )  # fmt: skip
    assert ended.returncode == 1
    assert "UsageError: this is a handler process" in ended.stderr
    assert "ShardStoppedError" in ended.stderr.splitlines()[-1]
    assert "must start the consumer under `if __name__ == '__main__':`" in ended.stderr.splitlines()[-1]


def test_processes_handle_records_outside_of_this_one(tmp_path):
    async def main():
        async with stream_world(1) as world:
            target = tmp_path / "ids"
            world.call("PutRecord", PartitionKey="a", Data=str(target).encode())
            consumer = world.consumer(app="billing", leases="memory://", until="tip")
            assert (await consumer.run(process_id_of, processes=1)).clean
            assert int(target.read_text()) != os.getpid()

    run(main)


def test_what_a_handler_returns_or_exits_with_does_not_leave_its_process():
    async def main():
        async with stream_world(1) as world:
            world.put(["a", "b"])
            happened = []
            consumer = world.consumer(
                app="billing", leases="memory://", order="key", until="tip", on_event=happened.append,
                on_failure=Retry(attempts=1),
            )  # fmt: skip
            with pytest.raises(ShardStoppedError):
                await consumer.run(exit_or_return_a_lock, processes=1)
            (failed,) = [event for event in happened if isinstance(event, events.HandlerFailed)]
            assert (failed.partition_key, failed.error) == ("a", "RuntimeError: the handler raised SystemExit(enough)")

    run(main)


def test_no_call_waits_for_a_process_while_its_time_runs(tmp_path):
    async def main():
        async with stream_world(1) as world:
            target = tmp_path / "go"
            for key in KEYS:
                world.call("PutRecord", PartitionKey=key, Data=os.fsencode(target))
            consumer = world.consumer(app="billing", leases="memory://", order="key", until="tip")
            running = asyncio.create_task(consumer.run(wait_for_file, processes=2, handle_signals=False))
            await until(lambda: consumer._consumer_run and consumer._consumer_run.has_joined, "the start")
            sink = consumer._consumer_run.processor
            await until(lambda: len(sink.running()) == 2, "two calls")
            await asyncio.sleep(0.2)
            assert len(sink.running()) == 2  # of eight that may start
            target.touch()
            assert (await running).clean

    run(main)


def test_a_record_that_kills_its_process_stops_its_shard_and_no_other(tmp_path):
    async def main():
        async with stream_world(2) as world:
            target = tmp_path / "numbers"
            for number, hash_key in enumerate(["0", "0", "0", str((1 << 128) - 1), str((1 << 128) - 1)]):
                data = f"{target} {number}".encode()
                world.call("PutRecord", PartitionKey="a", ExplicitHashKey=hash_key, Data=data)
            happened = []
            consumer = world.consumer(
                app="billing", leases="memory://", until="tip", on_event=happened.append,
                on_failure=Retry(attempts=2, backoff=0.01),
            )  # fmt: skip
            with pytest.raises(ShardStoppedError):
                await consumer.run(die_or_write, processes=1)
            assert sorted(target.read_text()) == ["0", "3", "4"]
            (stop,) = [event for event in happened if isinstance(event, events.ShardStopped)]
            assert stop.shard_id == "shardId-000000000000"

    run(main)


PROGRAM = """
import asyncio, dataclasses, os, signal, sys, time
from stream_world import QUICK, stream_world

def tell():
    os.kill(os.getpid(), signal.SIGTERM)

async def in_the_loop(record):
    tell()
    while True:
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            pass

def in_a_thread(record):
    tell()
    time.sleep(3600)

async def main():
    settings = dataclasses.replace(QUICK, leases=dataclasses.replace(QUICK.leases, drain_deadline=0.2))
    async with stream_world(1) as world:
        world.put(["a"])
        consumer = world.consumer(app="billing", leases="memory://", settings=settings)
        report = await consumer.run(globals()[sys.argv[1]])
        print("left", len(report.leftovers))

asyncio.run(main())
"""


@pytest.mark.parametrize("kind", ["in_the_loop", "in_a_thread"])
def test_a_signal_ends_a_process_whose_call_never_ends(kind):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM, kind],
        env=environment,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert (ended.returncode, ended.stdout) == (0, "left 1\n"), ended.stderr
    assert "outlived its lease" in ended.stderr.splitlines()[0]
    assert not any(word in ended.stderr for word in ("Traceback", "ignored", "destroyed"))


def test_a_process_logs_the_traceback_of_its_handler(caplog):
    async def main():
        async with stream_world(1) as world:
            world.put_payloads(b"1")
            consumer = world.consumer(app="billing", leases="memory://", until="tip", on_failure=Retry(attempts=1))
            with pytest.raises(ShardStoppedError):
                await consumer.run(failing, processes=1)

    caplog.set_level(logging.INFO, "anabranch")
    run(main)
    assert "in failing" in caplog.text
    assert "no customer key-0" in caplog.text
