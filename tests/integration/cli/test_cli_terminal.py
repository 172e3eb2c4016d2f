"""What reaches the terminal: nothing hostile from keys, payloads, names and errors; one line if it takes nothing."""

import asyncio
import os
import pty
import select
import signal
import subprocess
import sys
import time

import pytest
from rich.cells import cell_len

from anabranch import Aws, Consumer, ConsumerSettings, LeaseSettings, PollingSettings, Retry
from anabranch._cli.command_line import COMMANDS
from anabranch._model.leases import MemberRow
from anabranch.dead_letters.opening import open_destination
from anabranch.stores.urls import default_store
from letter_samples import a_letter
from patience import PATIENCE

from stream_world import Credentials

pytestmark = pytest.mark.long  # a process, or a worker, for each command

PROGRAM = (sys.executable, "-m", "anabranch")
HOSTILE = "\x1b]0;owned\x07\x1b[2J\x9b31m\x07\r\x7f\u202egnp\u2066\u200f"
ENDS_A_LINE = "\n2026-01-31 INFO forged"


def check(*texts):
    for text in texts:
        for line in text.split("\n"):
            assert line.isprintable() or not set(line) & set(HOSTILE), repr(line)
            assert not line.startswith("2026-01-31 INFO forged")


@pytest.mark.parametrize("command", COMMANDS)
def test_wrong_arguments_are_quoted_harmlessly(cli, command):
    for words in ([HOSTILE], [f"--{HOSTILE}"], ["orders", f"--{HOSTILE}", HOSTILE], [HOSTILE, HOSTILE, HOSTILE]):
        ended = cli(command, *words)
        assert ended.code in {1, 2}
        check(ended.out, ended.err)
    check(cli(HOSTILE).err)


@pytest.mark.parametrize("options", [(), ("--json",)], ids=["text", "json"])
def test_hostile_keys_and_payloads_reach_no_terminal(server, cli, options):
    key = f"k{HOSTILE}{ENDS_A_LINE}"
    put = cli("put", "orders", f"payload {HOSTILE}", "--key", key, *options)
    which = (
        cli("which-shard", "orders", key, "--", *options)
        if not options
        else cli("which-shard", "orders", key, "--json")
    )
    refused = cli("put", "orders", "{}", "--key-field", HOSTILE)
    for ended in (put, which, refused):
        check(ended.out, ended.err)
    assert (put.code, which.code, refused.code) == (0, 0, 1)
    assert "owned" in put.out
    shown = on_a_terminal("tail", "orders", "--from", "horizon", "--no-follow", *options)
    assert "owned" in shown
    check(shown.replace("\r\n", "\n"))


def test_records_in_a_pipe_are_not_changed(server, program):
    server.call("PutRecord", StreamName="orders", PartitionKey="k", Data=HOSTILE.encode())
    ended = program("tail", "orders", "--from", "horizon", "--no-follow", "--format", "%s", encoding="utf-8")
    assert ended.out == f"{HOSTILE}\n".replace("\r", "\n")  # text mode reads universal newlines


LONG_NAME = "billing-of-the-eastern-regions"
"""So long that the line with the totals does not fit into 80 columns."""


@pytest.fixture
def hostile_worker(server):
    """A consumer whose handler raises hostile errors, beside a member with a hostile name."""

    async def fail(record):
        raise ValueError(f"no such customer {HOSTILE}{ENDS_A_LINE}")

    async def start():
        settings = ConsumerSettings(
            leases=LeaseSettings(expiry=3.0),
            polling=PollingSettings(idle_interval=0.2),
        )
        aws = Aws(region=server.local.region, endpoint_url=server.local.endpoint_url, credentials=Credentials())
        options = {"settings": settings, "aws": aws, "start": "trim_horizon", "on_failure": Retry(attempts=1)}
        consumer = Consumer("orders", app=LONG_NAME, **options)
        task = asyncio.get_running_loop().create_task(consumer.run(fail, handle_signals=False))
        async with asyncio.timeout(PATIENCE):
            while not any(shard.phase == "stopped" for shard in consumer.status().shards):  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        store = default_store(LONG_NAME, os.environ)
        await store.open(await store.read_app())
        await store.register_member(MemberRow(member_id=f"w{HOSTILE}{ENDS_A_LINE}#1", expiry_ms=60_000))
        await store.close()
        return consumer, task

    async def stop(consumer, task):
        await consumer.stop()
        await task

    server.call(
        "PutRecord", StreamName="orders", PartitionKey=f"k{HOSTILE}{ENDS_A_LINE}", ExplicitHashKey="0", Data=b"x"
    )
    running = server.run(start())
    yield running
    server.run(stop(*running))


@pytest.mark.parametrize(
    "words",
    [
        ("apps", "ls"), ("apps", "show", LONG_NAME), ("top", LONG_NAME, "--once"), ("explain", LONG_NAME),
        ("explain", LONG_NAME, "0"), ("apps", "delete", LONG_NAME, "--yes"),
    ],
    ids=" ".join,
)  # fmt: skip
def test_hostile_names_and_errors_of_workers_reach_no_terminal(hostile_worker, cli, words):
    for options in ((), ("--json",)) if words[1] != "delete" else ((),):
        ended = cli(*words, *options)
        check(ended.out, ended.err)
        assert "Traceback" not in ended.err
    shown = on_a_terminal(*words)
    check(shown.replace("\r\n", "\n").replace("\x1b[", ""))
    if words[1] != "delete":  # an error is one line, however long
        assert max(cell_len(line) for line in shown.replace("\x1b[0m", "").splitlines()) <= 80


def test_the_log_of_a_run_is_clean(server, tmp_path, program):
    (tmp_path / "work.py").write_text(
        "import anabranch, logging\n"
        "from anabranch import Retry\n"
        "consumer = anabranch.Consumer('orders', app='logs', start='trim_horizon', until='tip',\n"
        "                              on_failure=Retry(attempts=2, backoff=0.01))\n"
        "@consumer.handler\n"
        "async def handle(record):\n"
        "    logging.getLogger('anabranch.mine').warning('seen %s', record.partition_key)\n"
        "    raise LookupError(record.data.decode())\n"
    )
    (tmp_path / "broken.py").write_text(f"raise ValueError({HOSTILE + ENDS_A_LINE!r})\n")
    key = f"k{HOSTILE}{ENDS_A_LINE}"
    server.call("PutRecord", StreamName="orders", PartitionKey=key, Data=f"{HOSTILE}{ENDS_A_LINE}".encode())
    ended = program("run", "work:consumer", cwd=tmp_path)
    assert ended.code == 1
    assert "owned" in ended.err
    check(ended.err)
    broken = program("run", "broken:consumer", cwd=tmp_path)
    assert (broken.code, "ValueError" in broken.err) == (1, True)
    check(broken.err.replace("\n2026-01-31 INFO forged", ""))  # a traceback has its own lines


def test_warnings_of_commands_without_a_log_are_clean(server, program):
    server.call("PutRecord", StreamName="orders", PartitionKey="k", Data=b"x")
    server.local.faults.on("GetRecords").fail(message=f"{HOSTILE}{ENDS_A_LINE}").at_most(2)
    ended = program("tail", "orders", "--from", "horizon", "--no-follow")
    server.local.faults.clear()
    assert ended.code == 0
    assert "owned" in ended.err
    check(ended.out, ended.err)


@pytest.mark.parametrize("columns", [60, 80])
def test_doctor_fits_the_terminal(server, columns):
    server.local.faults.on("DescribeStreamSummary").error("AccessDeniedException", "運賃 is not allowed " * 10)
    shown = on_a_terminal("doctor", "orders", columns=columns)
    server.local.faults.clear()
    assert "allow kinesis:DescribeStreamSummary" in " ".join(shown.split())
    assert max(cell_len(line) for line in shown.splitlines()) <= columns


def test_doctor_shows_hostile_answers_harmlessly(server, cli):
    server.local.faults.on("DescribeStreamSummary").error("AccessDeniedException", f"no {HOSTILE}{ENDS_A_LINE}")
    ended = cli("doctor", "orders")
    assert "owned" in ended.out
    check(ended.out, ended.err)
    server.local.faults.clear()


def on_a_terminal(*words, columns=80, lines=24, seconds=30):
    """What the program shows on a terminal, with its escape sequences; colours are off."""
    master, slave = pty.openpty()
    environment = {**os.environ, "TERM": "dumb", "NO_COLOR": "1", "COLUMNS": str(columns), "LINES": str(lines)}
    process = subprocess.Popen([*PROGRAM, *words], stdin=slave, stdout=slave, stderr=slave, env=environment)
    os.close(slave)
    shown = b""
    try:
        while select.select([master], [], [], seconds)[0]:
            try:
                part = os.read(master, 1 << 16)
            except OSError:  # the other end is closed
                break
            shown += part
        process.wait(timeout=seconds)
    finally:
        process.kill()
        process.wait()
        os.close(master)
    return shown.decode()


# Standard output is full, closed or absent

WITH_OUTPUT = [
    ("streams", "ls", "--json"),
    ("streams", "ls"),
    ("streams", "describe", "orders"),
    ("shards", "orders"),
    ("which-shard", "orders", "user-1"),
    ("put", "orders", "hello", "--key", "k"),
    ("put", "orders", "hello", "--key", "k", "--json"),
    ("tail", "orders", "--from", "horizon", "--no-follow"),
    ("doctor", "orders"),
    ("doctor", "orders", "--json"),
    ("reshard", "orders", "--to", "2", "--yes"),
    ("apps", "ls", "--json"),
    ("serve", "--port", "0"),
    ("demo", "--seconds", "1"),
    ("dlq", "ls", "sqlite:letters.db"),
    ("dlq", "ls", "sqlite:letters.db", "--json"),
    ("dlq", "show", "sqlite:letters.db", a_letter().idempotency_key),
    ("dlq", "redrive", "sqlite:letters.db", "--to-stream", "--dry-run"),
    ("apps", "show", "billing"),
    ("apps", "scale", "billing"),
    ("top", "billing", "--once"),
    ("explain", "billing"),
    ("completion", "bash"),
    ("--help",),
    ("tail", "--help"),
    ("--version",),
]


@pytest.fixture
def printable(server, tmp_path, monkeypatch):
    """There is something to print: a record, an application, a dead letter."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    server.call("PutRecord", StreamName="orders", PartitionKey="k", Data=b"hello")

    async def fill():
        writer = open_destination("sqlite:letters.db", app="billing", environ={})
        await writer.write(a_letter())
        await writer.close()
        aws = Aws(region=server.local.region, endpoint_url=server.local.endpoint_url, credentials=Credentials())
        await Consumer("orders", app="billing", start="trim_horizon", until="tip", aws=aws).run(handle)

    async def handle(record):
        pass

    server.run(fill())


def end(words, redirection):
    server_side = f'exec "$@" {redirection}'
    ended = subprocess.run(
        ["/bin/sh", "-c", server_side, "sh", *PROGRAM, *words], stdin=subprocess.DEVNULL, capture_output=True,
        text=True, timeout=PATIENCE, check=False,
    )  # fmt: skip
    return ended.returncode, [line for line in ended.stderr.splitlines() if "written to" not in line]


@pytest.mark.parametrize("words", WITH_OUTPUT, ids=" ".join)
def test_a_full_standard_output_is_one_line(printable, words):
    check_full_output(words)


@pytest.mark.parametrize("words", WITH_OUTPUT[::4], ids=" ".join)
def test_a_full_standard_output_without_a_buffer_is_one_line(printable, monkeypatch, words):
    monkeypatch.setenv("PYTHONUNBUFFERED", "1")
    check_full_output(words)


def check_full_output(words):
    code, said = end(words, "> /dev/full")
    assert code == 1
    assert [line for line in said if "nothing to do" not in line] == [
        "anabranch: cannot write to standard output: No space left on device"
    ]


@pytest.mark.parametrize("words", WITH_OUTPUT[:-3], ids=" ".join)
def test_an_absent_standard_output_is_one_line(printable, words):
    code, said = end(words, ">&-")
    assert code == 1
    assert [line for line in said if "nothing to do" not in line] == ["anabranch: standard output is closed"]


def test_absent_streams_are_no_place_for_sockets(server):
    assert end(("streams", "ls"), "<&- >&- 2>&-")[0] == 1
    assert end(("streams", "create", "made", "--shards", "1"), "2>&-")[0] == 0
    assert "made" in server.call("ListStreams")["StreamNames"]
    code, said = end(("put", "orders", "--key", "k"), "<&-")
    assert (code, said) == (2, ["anabranch put: error: standard input is closed: pass the record as DATA"])


@pytest.mark.parametrize(
    "words, expected",
    [
        (("put", "orders", "hello", "--key", "k"), 0),
        (("streams", "describe", "missing"), 1),
        (("streams", "describe"), 2),
        (("doctor", "orders", "--wrong"), 2),
        (("reshard", "orders", "--to", "4", "--yes"), 0),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else str(value),
)
def test_a_full_standard_error_does_not_change_the_exit_code(server, words, expected):
    assert end(words, "2> /dev/full")[0] == expected


def test_a_worker_of_dead_letters_needs_no_standard_output(printable, tmp_path):
    (tmp_path / "work.py").write_text(
        "import anabranch\n"
        "consumer = anabranch.Consumer('orders', app='billing')\n"
        "@consumer.handler\n"
        "async def handle(record):\n"
        "    open('handled', 'w').close()\n"
    )
    words = ["dlq", "worker", "work:consumer", "sqlite:letters.db", "--review", "sqlite:review.db"]
    process = subprocess.Popen(
        ["/bin/sh", "-c", 'exec "$@" >&-', "sh", *PROGRAM, *words], stderr=subprocess.PIPE, text=True
    )
    try:
        while not (tmp_path / "handled").exists():
            assert process.poll() is None
            time.sleep(0.02)
        process.send_signal(signal.SIGINT)
        said = process.communicate(timeout=PATIENCE)[1]
    finally:
        process.kill()
    assert (process.returncode, "Traceback" in said) == (0, False)


def test_run_needs_no_standard_output(server, tmp_path):
    (tmp_path / "work.py").write_text(
        "import anabranch\n"
        "consumer = anabranch.Consumer('orders', app='daemon', start='trim_horizon', until='tip')\n"
        "@consumer.handler\n"
        "async def handle(record):\n"
        "    print('handled')\n"
    )
    server.call("PutRecord", StreamName="orders", PartitionKey="k", Data=b"hello")
    script = f'cd {tmp_path} && exec "$@" --log error >&-'
    ended = subprocess.run(
        ["/bin/sh", "-c", script, "sh", *PROGRAM, "run", "work:consumer"], capture_output=True, timeout=60, check=False
    )
    assert (ended.returncode, ended.stderr) == (0, b"")


# Ctrl-C while the program starts

INTERRUPT_AT_IMPORT = """
import importlib.abc, os, runpy, signal, sys

class Interrupt(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == {module!r}:
            sys.meta_path.remove(self)
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Interrupt())
sys.argv = ["anabranch", "streams", "ls"]
runpy.run_module("anabranch", run_name="__main__")
"""


@pytest.mark.parametrize(
    "module",
    [
        "anabranch._cli.command_line", "argparse", "anabranch._cli.options", "anabranch._cli.output", "msgspec",
        "anabranch._cli.streams", "asyncio", "anabranch._cli.connection", "anabranch._aws.account", "botocore.session",
    ],
)  # fmt: skip
def test_ctrl_c_while_modules_are_loaded_is_no_traceback(server, module):
    ended = subprocess.run(
        [sys.executable, "-c", INTERRUPT_AT_IMPORT.format(module=module)],
        capture_output=True, text=True, timeout=PATIENCE, check=False,
    )  # fmt: skip
    assert ended.returncode in {130, -signal.SIGINT}
    assert (ended.stdout, ended.stderr) == ("", "")


# Completion

COMPLETE = """
source {script}
COMP_WORDS=({words})
COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1))
_shtab_anabranch 2>/dev/null
echo "${{COMPREPLY[@]}}"
"""


@pytest.mark.parametrize(
    "words, offered",
    [
        ('anabranch ""', set(COMMANDS)),
        ("anabranch stre", {"streams"}),
        ('anabranch streams ""', {"ls", "create", "describe", "delete", "consumers"}),
        ("anabranch tail --fr", {"--from"}),
        ("anabranch dlq export sqlite:///letters.db let", {"letters.jsonl"}),
        ("anabranch serve --data dat", {"data"}),
        ('anabranch completion ""', {"bash", "zsh", "tcsh"}),
    ],
)
def test_bash_completes_commands_and_options(cli, tmp_path, words, offered):
    script = tmp_path / "completion.bash"
    script.write_text(cli("completion", "bash").out)
    (tmp_path / "letters.jsonl").touch()
    (tmp_path / "data").mkdir()
    ended = subprocess.run(
        ["bash", "-c", COMPLETE.format(script=script, words=words)],
        capture_output=True, text=True, check=True, cwd=tmp_path,
    )  # fmt: skip
    assert set(ended.stdout.split()) == offered


def test_other_shells_get_a_script_too_and_unknown_ones_the_list(cli):
    assert "#compdef anabranch" in cli("completion", "zsh").out
    assert "complete anabranch" in cli("completion", "tcsh").out
    assert "bash" in cli("completion", "ksh").err


def test_only_completion_loads_its_library(program):
    code = (
        "import sys, anabranch._cli.command_line as c\n"
        "try: c.main(['streams', '--help'])\n"
        "except SystemExit: pass\n"
        "print('shtab' in sys.modules)"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ended.stdout.endswith("False\n")


def test_the_place_of_a_picture_is_checked_before_the_demo_begins(cli, tmp_path):
    nowhere = cli("demo", "--picture", str(tmp_path / "no" / "demo.svg"))
    assert (nowhere.code, nowhere.out) == (2, "")
    assert f"there is no folder {tmp_path / 'no'}" in nowhere.err
    folder = cli("demo", "--picture", str(tmp_path))
    assert (folder.code, folder.out) == (2, "")
    assert "is a folder; name a file" in folder.err


def test_a_picture_that_cannot_be_saved_is_one_line_after_the_audit():
    ended = subprocess.run(
        [*PROGRAM, "demo", "--seconds", "1", "--picture", "/dev/full"],
        capture_output=True, text=True, timeout=PATIENCE, check=False,
    )  # fmt: skip
    assert "What became of every record" in ended.stdout
    assert (ended.returncode, ended.stderr) == (1, "anabranch demo: cannot write /dev/full: No space left on device\n")


@pytest.mark.parametrize(
    "words",
    [
        ("top",), ("explain",), ("apps", "show"), ("apps", "delete"), ("apps", "scale"), ("doctor", "orders", "--app"),
        ("apps", "copy", "--from", "sqlite:///a.db", "--to", "sqlite:///b.db"), ("serve", "--host"),
    ],
    ids=" ".join,
)  # fmt: skip
def test_an_argument_that_is_no_text_is_refused(words, program):
    ended = program(*words, os.fsdecode(b"\xff"))
    assert (ended.code, ended.out) == (2, "")
    assert "Traceback" not in ended.err
    assert "udcff" in ended.err
