"""`anabranch run`: a consumer of the user's, alone and as a fleet of processes, and every way to name it wrongly."""

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import contextmanager

import pytest

from anabranch._cli.run import run_workers
from patience import PATIENCE

PROGRAM = (sys.executable, "-m", "anabranch")
MODULE = """
import os, sys
import anabranch
from anabranch import ConsumerSettings, LeaseSettings, PollingSettings

SETTINGS = ConsumerSettings(
    leases=LeaseSettings(expiry=3.0), polling=PollingSettings(idle_interval=0.2, listing_interval=1.0)
)
consumer = anabranch.Consumer("orders", app="billing", settings=SETTINGS)
once = anabranch.Consumer("orders", app="once", until="tip", settings=SETTINGS)
batches = anabranch.Consumer("orders", app="batches", until="tip", settings=SETTINGS)
without = anabranch.Consumer("orders", app="without")
alone = anabranch.Consumer("orders")
NUMBER = 3
in_memory = anabranch.Consumer("orders", app="x", leases="memory://")
stops = anabranch.Consumer(
    "orders", app="stops", until="tip", settings=SETTINGS, on_failure=anabranch.Retry(attempts=1)
)
follows = anabranch.Consumer("orders", app="follows", settings=SETTINGS, on_failure=anabranch.Retry(attempts=1))
missing = anabranch.Consumer("nowhere", app="missing", settings=ConsumerSettings(start_timeout=0))

@consumer.handler
@once.handler
@alone.handler
@in_memory.handler
@missing.handler
async def handle(record):
    if record.data == b"crash":
        os._exit(7)
    # One write for each line: two processes share the output.
    print(f"{os.getpid()} {record.partition_key} {record.data.decode()}\\n", end="", flush=True)

@stops.handler
@follows.handler
async def fail(record):
    print("failing", flush=True)
    raise LookupError("no such customer")

@batches.batch_handler(max_wait=0.1)
def handle_all(batch):
    print("batch of", len(batch), flush=True)
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "app.py").write_text(MODULE)
    (tmp_path / "broken.py").write_text("import anabranch\nanabranch.Consumer('or ders')\n")
    (tmp_path / "failing.py").write_text("def load():\n    raise KeyError('settings')\nload()\n")
    (tmp_path / "needy.py").write_text("import not_installed_here\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@contextmanager
def running(*arguments):
    process = subprocess.Popen(
        [*PROGRAM, "run", *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL,
        text=True, start_new_session=True,
    )  # fmt: skip
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def put(server, *texts, key="a"):
    for text in texts:
        server.call("PutRecord", StreamName="orders", PartitionKey=key, Data=text.encode())


def test_a_consumer_runs_until_its_end_and_says_what_it_does(server, folder, program):
    put(server, "one", "two")
    ended = program("run", "app:once")
    assert ended.code == 0
    assert [line.split()[1:] for line in ended.out.splitlines()] == [["a", "one"], ["a", "two"]]
    started = r"INFO application 'once' started as member \S+: anabranch \S+ reads orders in \S+, leases in sqlite:///\S+once\.db"
    assert re.search(started, ended.err)
    assert "INFO stopped after" in ended.err
    assert "2 records handled, 2 committed" in ended.err
    quiet = program("run", "app:batches", "--log", "warning")
    assert (quiet.code, quiet.out, quiet.err) == (0, "batch of 2\n", "")


def test_the_log_can_be_json(server, folder, program):
    put(server, "one")
    ended = program("run", "app:once", "--log-format", "json")
    lines = [json.loads(line) for line in ended.err.splitlines()]
    by_event = {line.get("event"): line for line in lines}
    assert by_event["ConsumerStarted"]["streams"] == ["orders"]
    assert by_event["ConsumerStopped"]["handled_count"] == 1
    assert {line["process"] for line in lines} == {lines[0]["process"]}


def test_every_line_is_json_also_of_the_parent_and_of_a_run_that_fails(server, folder, program):
    put(server, "one")
    ended = program("run", "app:stops", "--workers", "2", "--log-format", "json")
    assert ended.code == 1
    lines = [json.loads(line) for line in ended.err.splitlines()]
    assert any(re.fullmatch(r"2 workers: processes \d+, \d+", line["message"]) for line in lines)
    assert any(re.fullmatch(r"worker process \d+ ended with exit code 1.*", line["message"]) for line in lines)
    assert any("the records after it were not handled" in line["message"] for line in lines)


def test_a_signal_stops_it_in_order(server, folder):
    """What was handled was committed: it does not come again."""
    for number, text in ((signal.SIGINT, "one"), (signal.SIGTERM, "two")):
        put(server, text)
        with running("app:consumer", "--log", "error") as process:
            assert process.stdout.readline().split()[1:] == ["a", text]
            process.send_signal(number)
            assert process.wait(PATIENCE) == 0
            assert process.stderr.read() == ""


def test_a_signal_that_arrives_while_workers_start_stops_those_that_start(monkeypatch):
    create, signals = asyncio.create_subprocess_exec, [signal.SIGTERM]

    async def signal_and_create(*arguments, **options):
        if signals:
            os.kill(os.getpid(), signals.pop())
        return await create(*arguments, **options)

    monkeypatch.setattr(asyncio, "create_subprocess_exec", signal_and_create)
    sleeping = [sys.executable, "-c", "import time; time.sleep(600)"]
    code = asyncio.run(asyncio.wait_for(run_workers(sleeping, 2, lambda line, level: None), PATIENCE))
    assert code == 0


def test_a_run_that_ends_with_a_stopped_shard_fails_and_names_its_record(server, folder, program):
    place = server.call("PutRecord", StreamName="orders", PartitionKey="a", Data=b"one")["SequenceNumber"]
    ended = program("run", "app:stops", "--log", "error")
    assert ended.code == 1
    assert f" is stopped at record {place} of key 'a': its handler failed with" in ended.err
    assert ended.err.endswith(
        "the records after it were not handled; fix the cause and run again: a new worker retries the record\n"
    )


def test_a_signal_that_finds_a_stopped_shard_ends_in_failure(server, folder):
    put(server, "one")
    with running("app:follows", "--log", "error") as process:
        assert process.stdout.readline() == "failing\n"
        while "stopped at record" not in process.stderr.readline():
            pass
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE) == 1
        assert "LookupError: no such customer" in process.stderr.read()


def test_several_workers_share_the_shards_and_end_together(server, folder):
    with running("app:consumer", "--workers", "2", "--log", "error") as process:
        assert process.stderr.readline().startswith("2 workers: processes ")
        workers = set()
        deadline = time.monotonic() + PATIENCE
        while len(workers) < 2:
            assert time.monotonic() < deadline, "one worker has got everything"
            for text, hash_key in (("low", "0"), ("high", str((1 << 128) - 1))):
                server.call("PutRecord", StreamName="orders", PartitionKey=text, ExplicitHashKey=hash_key, Data=b"x")
            for _ in range(2):
                workers.add(process.stdout.readline().split()[0])
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE) == 0
        for worker in workers:
            with pytest.raises(ProcessLookupError):
                os.kill(int(worker), 0)


def test_the_others_continue_after_a_worker_was_killed_and_its_end_is_the_exit_code(server, folder):
    with running("app:consumer", "--workers", "2", "--log", "error") as process:
        workers = [int(word.strip(",")) for word in process.stderr.readline().split()[3:]]
        put(server, "one")
        victim = int(process.stdout.readline().split()[0])
        os.kill(victim, signal.SIGKILL)
        assert process.stderr.readline() == (
            f"worker process {victim} ended with SIGKILL: its shards go to 1 other worker\n"
        )
        put(server, "two")
        texts = []
        while texts[-1:] != ["two"]:  # the first comes again if its commit was not written
            process_id, _, text = process.stdout.readline().split()
            assert int(process_id) in set(workers) - {victim}
            texts.append(text)
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE) == 128 + signal.SIGKILL


def test_workers_stop_in_order_when_the_program_that_started_them_was_killed(server, folder):
    with running("app:consumer", "--workers", "2") as process:
        started = 0
        while started < 2:
            started += "started as member" in process.stderr.readline()
        process.kill()
        process.wait()
        _, words = process.communicate(timeout=PATIENCE)  # until no worker holds the other end any more
        assert words.count("INFO stopped") == 2


def test_a_fleet_whose_workers_all_fail_ends_with_their_exit_code(server, folder):
    put(server, "crash")
    with running("app:consumer", "--workers", "2", "--log", "error") as process:
        assert process.wait(PATIENCE) == 7
        assert process.stderr.read().count("ended with exit code 7") == 2


def test_a_failure_is_one_line_of_advice(server, folder, program):
    ended = program("run", "app:missing", "--log", "error")
    assert (ended.code, ended.out) == (1, "")
    assert "nowhere" in ended.err
    assert "Traceback" not in ended.err


@pytest.mark.parametrize(
    "words, code, advice",
    [
        (("app",), 2, "'app' is not MODULE:NAME; write for example app:consumer"),
        (("app.py:consumer",), 2, "'app.py' is a file: name it as a module, app:consumer"),
        (("nowhere:consumer",), 2, "there is no module 'nowhere': looked in "),
        (("app:nothing",), 2, "module 'app' has no 'nothing'; consumers there: alone, batches, consumer,"),
        (("app:handle",), 2, "app:handle is a function, not a Consumer; consumers there: alone"),
        (("app:SETTINGS",), 2, "app:SETTINGS is a ConsumerSettings, not a Consumer"),
        (("app:NUMBER",), 2, "app:NUMBER is an int, not a Consumer"),
        (("app:without",), 2, "app:without has no handler: decorate a function with @without.handler"),
        (("needy:consumer",), 1, "module 'needy' cannot be imported: No module named 'not_installed_here'"),
        (("failing:consumer",), 1, "module 'failing' cannot be imported: KeyError: 'settings'"),
        (("broken:consumer",), 2, "or ders"),
        (("app:alone", "--workers", "2"), 2, "does not share leases, so each worker would handle every record"),
        (("app:in_memory", "--workers", "2"), 2, "does not share leases"),
        (("app:consumer", "--workers", "0"), 2, "is not a whole number above 0"),
    ],
)
def test_mistakes_are_answered_with_what_would_be_right(folder, cli, monkeypatch, words, code, advice):
    monkeypatch.setattr(sys, "path", list(sys.path))
    for name in ("app", "broken", "failing", "needy"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    ended = cli("run", *words)
    assert (ended.code, ended.out) == (code, "")
    assert advice in ended.err


def test_an_error_in_the_module_is_shown_from_its_own_line_on(folder, cli, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    ended = cli("run", "failing:consumer")
    assert 'failing.py", line 3' in ended.err
    assert "importlib" not in ended.err
