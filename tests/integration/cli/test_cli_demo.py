"""`anabranch demo` as a program: the audit, the keys, Ctrl-C, and nothing left behind."""

import json
import os
import pty
import re
import signal
import subprocess
import sys
import termios
import time
from contextlib import contextmanager
from fcntl import ioctl
from struct import pack

import pytest

from patience import PATIENCE

PROGRAM = (sys.executable, "-m", "anabranch", "demo")
ESCAPES = re.compile(rb"\x1b\[[0-9;?]*[A-Za-z]")


@contextmanager
def on_a_terminal(folder, *options, rows=24, columns=80):
    ours, theirs = pty.openpty()
    ioctl(theirs, termios.TIOCSWINSZ, pack("HHHH", rows, columns, 0, 0))
    environment = {name: value for name, value in os.environ.items() if name not in {"COLUMNS", "LINES"}}
    process = subprocess.Popen(
        [*PROGRAM, *options],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
        env={**environment, "TERM": "xterm", "TMPDIR": str(folder)},
    )
    os.close(theirs)
    try:
        yield process, ours
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        os.close(ours)


def without_a_terminal(*options, **environment):
    return subprocess.run(
        [*PROGRAM, "--seed", "7", *options],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=1.5 * PATIENCE,
        check=False,
        env={**os.environ, "COLUMNS": "80"} | {name: str(value) for name, value in environment.items()},
    )


def read_until(descriptor, wanted):
    """What the terminal got, without escapes, up to a text; or up to the end of the program."""
    seen, deadline = b"", time.monotonic() + PATIENCE
    while wanted is None or wanted not in ESCAPES.sub(b"", seen):
        assert time.monotonic() < deadline, ESCAPES.sub(b"", seen).decode()[-2_000:]
        try:
            seen += os.read(descriptor, 65_536)
        except OSError:  # the last process that held the terminal is gone
            break
    return ESCAPES.sub(b"", seen).decode()


def children_of(process):
    listed = subprocess.run(
        ["ps", "-A", "-o", "ppid=,pid="], capture_output=True, text=True, timeout=PATIENCE, check=True
    )
    pairs = [line.split() for line in listed.stdout.splitlines()]
    return {int(child) for parent, child in pairs if int(parent) == process.pid} - {process.pid}


def is_running(process_id):
    listed = subprocess.run(
        ["ps", "-o", "stat=,args=", "-p", str(process_id)],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    return "anabranch._demo" in listed.stdout and not listed.stdout.startswith("Z")


@pytest.mark.long
def test_without_a_terminal_it_prints_lines_and_ends_with_a_clean_audit(tmp_path):
    ended = without_a_terminal("--seconds", "2", TMPDIR=tmp_path)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert "seed 7" in ended.stdout
    assert "(kill -9)" in ended.stdout
    assert re.search(r"not handled +(│ +\d+ )+│ +0 │", ended.stdout)
    assert re.search(r"out of order +(│ +\d+ )+│ +0 │", ended.stdout)
    assert "never" not in ended.stdout  # a peer that is slow may read the shard later
    assert max(len(line) for line in ended.stdout.partition("What became")[2].splitlines()) <= 80
    assert "serve --create orders:4" in ended.stdout
    assert list(tmp_path.iterdir()) == []


SUBSCRIPTIONS = """
import sys

if "anabranch._demo.worker" in sys.orig_argv:
    from anabranch._aws.kinesis_client import KinesisClient

    async def subscribe(self, consumer_arn, shard_id, position, original=KinesisClient.subscribe_to_shard):
        subscription = await original(self, consumer_arn, shard_id, position)
        with open({path!r}, "a") as accepted:
            accepted.write(shard_id + "\\n")
        return subscription

    KinesisClient.subscribe_to_shard = subscribe
"""


@pytest.mark.long
def test_with_fan_out_the_workers_subscribe_and_the_audit_is_clean(tmp_path):
    accepted = tmp_path / "accepted"
    (tmp_path / "sitecustomize.py").write_text(SUBSCRIPTIONS.format(path=str(accepted)))
    ended = without_a_terminal("--fanout", "--seconds", "2", PYTHONPATH=tmp_path)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert "by fan-out" in ended.stdout
    assert re.search(r"not handled +(│ +\d+ )+│ +0 │", ended.stdout)
    assert re.search(r"out of order +(│ +\d+ )+│ +0 │", ended.stdout)
    assert len(set(accepted.read_text().split())) >= 4


def story(output):
    return re.findall(r"^ {8}(\S.*)$", output, re.MULTILINE)


@pytest.mark.long
def test_a_seed_repeats_the_story_and_the_careful_loop_loses_nothing(tmp_path):
    first, second = (without_a_terminal("--seconds", "8", TMPDIR=tmp_path).stdout for _ in range(2))
    assert story(first) == story(second)
    assert "killed worker" in first
    careful = without_a_terminal("--seconds", "4", "--json", TMPDIR=tmp_path)
    verdict = json.loads(careful.stdout)["peers"]["careful"]
    assert (verdict["lost"], verdict["out_of_order"]) == (0, 0)


LATE = """
import os, sys

if "anabranch._demo.worker" in sys.orig_argv:
    written, write = 0, os.write

    def write_late(descriptor, line):
        global written
        written += 1
        at_ns, rest = line.split(b" ", 1)
        return write(descriptor, b"%d %s" % (int(at_ns) + (written % 50 == 0) * 2_000_000_000, rest))

    os.write = write_late
"""


@pytest.mark.long
def test_a_record_that_our_side_handles_out_of_order_is_shown_and_is_the_exit_code(tmp_path):
    """A fault is planted in the workers: every fiftieth record is handled two seconds late."""
    (tmp_path / "sitecustomize.py").write_text(LATE)
    ended = without_a_terminal("--seconds", "2", "--json", PYTHONPATH=tmp_path)
    assert ended.returncode == 1
    assert "seed 7" in ended.stderr
    audit = json.loads(ended.stdout)
    assert (audit["seed"], audit["ours"]["lost"]) == (7, 0)
    assert audit["ours"]["out_of_order"] > 0
    assert audit["recoveries"][0]["after"] == "a split"


@pytest.mark.long
def test_on_a_small_terminal_the_keys_are_shown_and_taken_and_q_ends_with_the_audit(tmp_path):
    with on_a_terminal(tmp_path, "--seconds", "60") as (process, terminal):
        before = read_until(terminal, b"q end")  # the last line of the picture fits into 24
        after = ""
        for key, done in ((b"s", b"split shard"), (b"m", b"merged shard"), (b"k", b"(kill -9)"), (b"t", b"throttled")):
            os.write(terminal, key)
            after += read_until(terminal, done)
        os.write(terminal, b"q")
        audit = read_until(terminal, b"Try next")
        rest = read_until(terminal, None)
        assert process.wait(PATIENCE) == 0
    assert "the stream: hash space across" in before
    assert "could not" not in after
    assert "What became of every record" in audit
    assert "tail orders" in audit + rest
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "number, code",
    [
        (signal.SIGINT, 130),
        pytest.param(signal.SIGTERM, 143, marks=pytest.mark.long),
        pytest.param(signal.SIGHUP, 129, marks=pytest.mark.long),
    ],
)
def test_a_signal_ends_it_at_once_and_leaves_no_process_and_no_file(tmp_path, number, code):
    with on_a_terminal(tmp_path) as (process, terminal):
        read_until(terminal, b"q end")
        os.write(terminal, b"t")
        read_until(terminal, b"throttled")
        children = children_of(process)
        assert len(children) >= 4
        os.killpg(process.pid, number)
        shown = read_until(terminal, None)
        assert process.wait(PATIENCE) == code
    assert "Traceback" not in shown
    assert not any(is_running(child) for child in children)
    assert list(tmp_path.iterdir()) == []


def test_its_processes_do_not_outlive_a_demo_that_was_killed(tmp_path):
    with on_a_terminal(tmp_path) as (process, terminal):
        read_until(terminal, b"q end")
        children = children_of(process)
        assert len(children) >= 4
        process.kill()
        process.wait(PATIENCE)
    deadline = time.monotonic() + PATIENCE
    while any(is_running(child) for child in children):
        assert time.monotonic() < deadline, "processes outlive the demo"
        time.sleep(0.05)


@pytest.mark.parametrize(
    "options, advice",
    [
        (("--seconds", "0"), "'0' is not a number of seconds from 1 to 3600"),
        (("--seconds", "long"), "'long' is not a number of seconds from 1 to 3600"),
        (("--rate", "-5"), "'-5' is not a number of records from 1 to 2000"),
        (("--rate", "1e3"), "'1e3' is not a number of records from 1 to 2000"),
    ],
)
def test_what_cannot_be_shown_is_refused(cli, options, advice):
    ended = cli("demo", *options)
    assert ended.code == 2
    assert advice in ended.err
