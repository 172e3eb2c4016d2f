"""Workers and redrives that are killed with `kill -9` at each step: one letter by its key, no second call, no loss."""

import asyncio
import itertools
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from anabranch import DeadLetters, Producer
from anabranch.dead_letters.opening import open_destination
from anabranch.testing.doubles import run_local_kinesis
from letter_samples import AWS_NAMES, a_letter, moto

WORKER = Path(__file__).with_name("letter_worker.py")
REDRIVE = Path(__file__).with_name("redrive_worker.py")
RECORDS = [f"{'poison' if number % 7 == 3 else 'order'}-{number}" for number in range(20)]
POISON = [name for name in RECORDS if name.startswith("poison")]


@pytest.fixture(scope="module")
def server():
    with moto() as server:
        yield server


@pytest.mark.long
@pytest.mark.parametrize(
    "kind, step",
    [*itertools.product(["sqlite", "sqs"], ["decided", "written", "finished"]), ("s3", "written"), ("fifo", "written")],
)
def test_a_record_becomes_one_letter_and_is_not_handled_again(step, kind, tmp_path, server, monkeypatch):
    name = f"killed-{step}-{kind}"
    url = {
        "sqlite": lambda: f"sqlite://{tmp_path}/letters.db",
        "s3": lambda: server.make_bucket(name),
        "sqs": lambda: server.make_queue(name),
        "fifo": lambda: server.make_queue(f"{name}.fifo"),
    }[kind]()
    journal = tmp_path / "journal"
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))

    async def fill():
        async with Producer("orders") as producer:
            for number, data in enumerate(RECORDS):
                await producer.put(data.encode(), f"customer-{number % 5}")

    async def letters():
        async with DeadLetters(url) as box:
            return [letter async for letter in box.letters()]

    def run(step):
        command = [sys.executable, str(WORKER), step, url, str(journal)]
        return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env=os.environ)

    with run_local_kinesis(create={"orders": 2}) as kinesis:
        for variable, value in kinesis.environment().items():
            monkeypatch.setenv(variable, value)
        asyncio.run(fill())
        for _ in range(2):
            assert run(step).returncode == -signal.SIGKILL
        ended = run("none")
        assert ended.returncode == 0, ended.stderr
        found = asyncio.run(letters())
    assert sorted(letter.payload.decode() for letter in found) == sorted(POISON)
    assert len({letter.idempotency_key for letter in found}) == len(POISON)
    calls = Counter(journal.read_text().split())
    assert set(calls) == set(RECORDS), "a record was lost"
    assert {name: calls[name] for name in POISON} == dict.fromkeys(POISON, 2), "the handler was called again"


@pytest.mark.long
@pytest.mark.parametrize("kind", ["sqlite", "sqs", "fifo"])
@pytest.mark.parametrize("step", ["read", "handled", "deleted", "reviewed"])
def test_a_redrive_that_is_killed_loses_nothing_and_repeats_only_what_it_was_working_on(
    kind, step, tmp_path, server, monkeypatch
):
    for name, value in AWS_NAMES.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("anabranch.dead_letters.sqs.WAIT_SECONDS", 0)
    name = f"redriven-{step}.fifo" if kind == "fifo" else f"redriven-{step}"
    url = f"sqlite://{tmp_path}/letters.db" if kind == "sqlite" else server.make_queue(name)
    review, journal = f"sqlite://{tmp_path}/review.db", tmp_path / "journal"
    letters = [a_letter(n, key=f"key-{n % 2}", payload=b"poison" if n == 2 else None) for n in range(6)]

    async def fill():
        writer = open_destination(url, app="billing", environ={})
        for letter in letters:
            await writer.write(letter)
        await writer.close()

    async def left(url):
        async with DeadLetters(url) as box:
            return [letter.sequence_number async for letter in box.letters()]

    def run(step):
        command = [sys.executable, str(REDRIVE), step, url, review, str(journal)]
        return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env=os.environ)

    asyncio.run(fill())
    assert run(step).returncode == -signal.SIGKILL
    time.sleep(1.5)  # until the hold of the dead process has expired
    ended = run("none")
    assert ended.returncode == 0, ended.stderr
    assert asyncio.run(left(url)) == []
    assert asyncio.run(left(review)) == ["2"]
    calls = journal.read_text().split()
    assert set(calls) == set("012345")
    assert len(calls) == 6 + (step in {"handled", "reviewed"})
    for key in ("024", "135") if kind != "fifo" else ():  # when holds expire, moto gives the last of a group first
        assert sorted(one for one in calls if one in key) == [one for one in calls if one in key], "out of order"


@pytest.mark.long
@pytest.mark.parametrize("kind", ["sqlite", "s3"])
def test_a_letter_that_kills_the_process_goes_to_review_after_three_calls(kind, tmp_path, server, monkeypatch):
    for name, value in AWS_NAMES.items():
        monkeypatch.setenv(name, value)
    url = f"sqlite://{tmp_path}/letters.db" if kind == "sqlite" else server.make_bucket("deadly")
    review, journal = f"sqlite://{tmp_path}/review.db", tmp_path / "journal"

    async def fill():
        writer = open_destination(url, app="billing", environ={})
        for number in range(4):
            await writer.write(a_letter(number, payload=b"deadly" if number == 1 else None))
        await writer.close()

    async def left(url):
        async with DeadLetters(url) as box:
            return [letter async for letter in box.letters()]

    def run():
        command = [sys.executable, str(REDRIVE), "none", url, review, str(journal)]
        return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env=os.environ)

    asyncio.run(fill())
    for calls in range(1, 4):
        assert run().returncode == -signal.SIGKILL
        assert [letter.redrives_cut_off for letter in asyncio.run(left(url))] == [calls, 0, 0]
        time.sleep(1.5)  # until the hold of the dead process has expired
    ended = run()
    assert ended.returncode == 0, ended.stderr
    assert asyncio.run(left(url)) == []
    (reviewed,) = asyncio.run(left(review))
    assert (reviewed.sequence_number, reviewed.error_type, reviewed.attempts) == ("1", "ProcessDied", 3)
    assert Counter(journal.read_text().split()) == {"0": 1, "1": 3, "2": 1, "3": 1}
