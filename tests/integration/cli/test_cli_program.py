"""The command line as a program: first mistakes, help, colours, pipes and Ctrl-C."""

import argparse
import os
import re
import signal
import subprocess
import sys
import sysconfig
import time
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from anabranch import __version__
from anabranch._cli.command_line import COMMANDS, load, make_parser
from patience import PATIENCE

PROGRAM = (sys.executable, "-m", "anabranch")


def _with_actions(parser, words):
    """The words of a command and of each of its actions, as its parser knows them."""
    yield words
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, inner in action.choices.items():
                yield from _with_actions(inner, (*words, name))


def _actions():
    _, parsers = make_parser()
    for name, parser in parsers.items():
        load(name)(parser)
        yield from _with_actions(parser, (name,))


ACTIONS = list(_actions())


@contextmanager
def running(*arguments, **options):
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    process = subprocess.Popen([*PROGRAM, *arguments], **{**pipes, **options})
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def test_the_installed_program_answers(server, program):
    script = Path(sysconfig.get_path("scripts")) / "anabranch"
    version = subprocess.run([script, "--version"], capture_output=True, text=True, timeout=PATIENCE, check=True)
    assert version.stdout == f"anabranch {__version__}\n"
    listed = program("streams", "ls")
    assert (listed.code, listed.err) == (0, "")
    assert [line.split()[0] for line in listed.out.splitlines()] == ["STREAM", "orders", "returns"]


def test_no_command_is_answered_with_the_list_of_them(cli):
    ended = cli()
    assert (ended.code, ended.out) == (2, "")
    assert all(f"  {name}" in ended.err for name in COMMANDS)


def test_an_unknown_command_is_answered_with_the_one_that_was_meant(cli):
    ended = cli("strems", "--json")
    assert (ended.code, ended.out) == (2, "")
    assert "unknown command 'strems'; did you mean streams?" in ended.err
    other = cli("consume")
    assert other.code == 2
    assert f"unknown command 'consume'; the commands are {', '.join(COMMANDS)}" in other.err


def test_an_option_before_the_command_is_an_error_that_shows_where_it_goes(cli):
    ended = cli("--profile", "production", "streams", "ls")
    assert (ended.code, ended.out) == (2, "")
    assert "--profile belongs after the command: anabranch COMMAND --profile ..." in ended.err


def test_the_list_of_commands_has_one_line_for_each_within_eighty_columns(cli, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    shown = cli("--help").out.splitlines()
    assert max(map(len, shown)) <= 80
    for name, summary in COMMANDS.items():
        assert f"  {name:<11}  {summary}" in shown


def test_an_unknown_option_is_answered_by_the_command_that_was_asked(cli):
    ended = cli("tail", "orders", "--horizon")
    assert (ended.code, ended.out) == (2, "")
    assert ended.err.startswith("usage: anabranch tail")
    assert "unrecognized arguments: --horizon; `anabranch tail --help` lists" in ended.err


@pytest.mark.parametrize("words", ACTIONS, ids=" ".join)
def test_help_has_an_example_and_fits_eighty_columns(cli, monkeypatch, words):
    monkeypatch.setenv("COLUMNS", "80")
    ended = cli(*words, "--help")
    assert ended.code == 0
    assert re.search(r"^examples?:$", ended.out, re.MULTILINE)
    assert max(len(line) for line in ended.out.splitlines()) <= 80


def test_first_mistakes_are_answered_in_one_line_of_advice(cli, monkeypatch):
    def said(*options):
        ended = cli("streams", "ls", *options)
        assert (ended.code, ended.out) == (1, "")
        assert ended.err.count("\n") == 1
        return ended.err

    assert "no AWS region: set AWS_REGION, pass one (--region, Aws(region=...))" in said()
    assert "no AWS credentials: run `aws configure` or `aws sso login`" in said("--region", "eu-west-1")
    assert "The config profile (nobody) could not be found" in said("--profile", "nobody")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "local")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "local")
    refused = said("--region", "eu-west-1", "--endpoint-url", "http://127.0.0.1:9")
    assert "http://127.0.0.1:9" in refused
    assert "check that the server is running" in refused


def test_help_and_mistakes_load_nothing_heavy(program):
    code = (
        "import sys, anabranch._cli.command_line as c\n"
        "try: c.main(['reshard', '--help'])\n"
        "except SystemExit: pass\n"
        "print('loaded:', sorted({'botocore', 'rich', 'h2', 'asyncio'} & set(sys.modules)))"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE, check=True)
    assert "loaded: ['asyncio']" in ended.stdout or "loaded: []" in ended.stdout


@pytest.mark.parametrize(
    "words, title, state",
    [
        (("streams", "create", "payments", "--shards", "1"), "creating payments", "CREATING"),
        (("streams", "delete", "orders", "--yes"), "deleting orders", "DELETING"),
        (("reshard", "orders", "--to", "4", "--yes"), "step 1 of 1", "UPDATING, 2 open shards"),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else "",
)
def test_ctrl_c_ends_the_waiting_and_says_that_the_service_continues(slow_server, words, title, state):
    while slow_server.status("orders") != "ACTIVE":
        time.sleep(0.02)
    slow_server.freeze()
    with running(*words) as process:
        said = b""
        while f"{title}: {state}\n".encode() not in said:
            line = process.stderr.readline()
            assert line, said
            said += line
        process.send_signal(signal.SIGINT)
        assert process.wait(PATIENCE) == 130
        assert process.stderr.read() == f"{title}: stopped waiting; Kinesis continues the change\n".encode()


def test_ctrl_c_does_not_wait_for_a_call_that_never_ends(server):
    rule = server.local.faults.on("ListStreams").half_open()
    with running("streams", "ls") as process:
        while not rule.struck:
            with suppress(subprocess.TimeoutExpired):
                pytest.fail(f"it ended with {process.wait(timeout=0.02)}")
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 130  # botocore would wait for a minute
        assert process.stderr.read() == b""


def test_ctrl_c_is_an_answer_to_a_question_too(server):
    master, slave = os.openpty()
    try:
        with running("reshard", "orders", "--to", "4", stdin=slave) as process:
            said = b""
            while not said.endswith(b"[y/N] "):
                said += process.stderr.read(1)
            process.send_signal(signal.SIGINT)
            assert process.wait(PATIENCE) == 130
            assert b"Traceback" not in process.stderr.read()
    finally:
        os.close(master)
        os.close(slave)
    assert len(server.open_shard_ids()) == 2


def test_a_reader_that_has_seen_enough_is_no_error_to_talk_about(server):
    with running("shards", "orders", "--json") as process:
        process.stdout.close()
        assert process.wait(PATIENCE) == 1
        assert process.stderr.read() == b""
        process.stdout = None


@pytest.mark.parametrize("no_color", [False, True])
def test_terminals_get_colours_unless_they_want_none(server, no_color):
    environment = {**os.environ, "TERM": "xterm-256color"} | ({"NO_COLOR": "1"} if no_color else {})
    master, slave = os.openpty()
    try:
        subprocess.run([*PROGRAM, "streams", "ls"], stdout=slave, env=environment, timeout=PATIENCE, check=True)
        shown = os.read(master, 1 << 16).decode()
    finally:
        os.close(master)
        os.close(slave)
    assert "orders" in shown
    assert bool(re.search(r"\x1b\[3[0-7]m", shown)) is not no_color


def test_an_output_without_unicode_is_drawn_in_ascii(server, program):
    ended = program("shards", "orders", environment={"PYTHONIOENCODING": "ascii"})
    assert ended.code == 0
    assert f"{'#' * 24}{'.' * 24}" in ended.out
    keys = program("which-shard", "orders", "müller", environment={"PYTHONIOENCODING": "ascii"})
    assert keys.out.splitlines()[1].startswith("m\\xfcller")
