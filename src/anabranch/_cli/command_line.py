"""`anabranch COMMAND ...`: finds the command, parses its arguments and turns errors into exit codes.

A command is a module that implements `Command` and is listed in `COMMANDS`; only the requested one is imported.
Exit codes: 0 done, 1 failed, 2 wrong usage, 130 interrupted. Data goes to standard output, everything else to standard
error. An error is one line that says what to do instead.
"""

import argparse
import importlib
import io
import os
import sys
from collections.abc import Sequence
from difflib import get_close_matches
from typing import Final, NoReturn, Protocol, cast

from anabranch._cli.options import join_spans
from anabranch._cli.output import FAILED, INTERRUPTED, UNUSABLE
from anabranch._version import __version__
from anabranch.errors import AnabranchError, ConfigurationError

_GROUPS: Final[dict[str, dict[str, str]]] = {
    "first steps": {
        "demo": "see it work on this machine, without an AWS account",
        "serve": "run a local Kinesis that AWS SDKs can use",
        "doctor": "check credentials, permissions, clock, limits and lease store",
    },
    "streams": {
        "streams": "list, create, describe and delete streams",
        "shards": "show a stream's shards: their lineage and hash ranges",
        "reshard": "change a stream's shards: to a number, split one, merge two",
        "which-shard": "show which shard a partition key maps to",
    },
    "records": {
        "put": "write records: one, or one for each line of standard input",
        "tail": "show the records of a stream as they arrive",
    },
    "applications": {
        "run": "run your consumer, in one process or several",
        "apps": "list, show and delete applications: workers and checkpoints",
        "top": "watch an application live: workers, shards, lag, rate",
        "explain": "explain why a shard is stalled",
    },
}
COMMANDS: Final = {name: summary for commands in _GROUPS.values() for name, summary in commands.items()}
"""Command name (also its module here) and its line in the help."""

_EPILOG: Final = """\
examples:
  anabranch demo                      the whole product, without an AWS account
  anabranch serve --create orders:4   a local Kinesis to develop against
  anabranch doctor orders             check access to a stream
  anabranch tail orders --from -15m   the last 15 minutes

`anabranch COMMAND --help` has examples. Region, credentials and endpoint come
from the standard AWS environment and profile, or from each command's options.
Exit codes: 0 done, 1 failed, 2 wrong usage, 130 interrupted.
"""


class Command(Protocol):
    """With `TAKES_PROGRAM = True` in the module, `arguments.program` is what follows `--`, or None."""

    def add_arguments(self, parser: argparse.ArgumentParser, /) -> None: ...
    def run(self, arguments: argparse.Namespace, /) -> int: ...


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code. Without `argv` it is the program itself, and Ctrl-C ends the process at once."""
    if argv is None:
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, io.TextIOWrapper):
                stream.reconfigure(errors="backslashreplace")  # never fail because a key cannot be printed
    given = list(sys.argv[1:] if argv is None else argv)
    try:
        code = _run(given)
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        # The reader closed the pipe (`| head`): discard what is still buffered.
        for stream in (sys.stdout, sys.stderr):
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
        return FAILED
    except KeyboardInterrupt:
        if argv is None:
            _leave_at_once()
        return INTERRUPTED


def _run(given: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="anabranch",
        usage="anabranch [-h] [--version] COMMAND ...",
        description=f"Kinesis for Python.\n\n{_listed()}",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"anabranch {__version__}")
    commands = parser.add_subparsers(prog="anabranch", dest="command", help=argparse.SUPPRESS)
    chosen = next((word for word in given if not word.startswith("-")), None)
    if given and given[0].startswith("-") and given[0] not in {"-h", "--help", "--version"}:
        parser.error(f"{given[0]} belongs after the command: anabranch COMMAND {given[0]} ...")
    if chosen is not None and chosen not in COMMANDS:
        parser.error(_unknown(chosen))
    command: Command | None = None
    asked = parser
    program: list[str] | None = None
    for name, summary in COMMANDS.items():
        subparser = commands.add_parser(
            name,
            help=summary,
            description=f"{summary[0].upper()}{summary[1:]}.",
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        if name == chosen:
            asked = subparser
            command = cast("Command", importlib.import_module(f"anabranch._cli.{name.replace('-', '_')}"))
            command.add_arguments(subparser)
            if getattr(command, "TAKES_PROGRAM", False):
                given, program = _split_program(given)
    arguments, unknown = parser.parse_known_args(join_spans(given), argparse.Namespace(program=program))
    if unknown:
        asked.error(f"unrecognized arguments: {' '.join(unknown)}; `{asked.prog} --help` lists the options")
    if command is None:
        parser.print_help(sys.stderr)
        return UNUSABLE
    try:
        return command.run(arguments)
    except ConfigurationError as error:
        for violation in error.violations:
            print(f"anabranch {arguments.command}: error: {_one_line(violation)}", file=sys.stderr)
        return UNUSABLE
    except AnabranchError as error:
        print(f"anabranch {arguments.command}: {_one_line(str(error))}", file=sys.stderr)
        return FAILED


def _listed() -> str:
    """The commands by group; argparse would print one long list and wrap the longest line."""
    width = max(map(len, COMMANDS))
    groups = (
        "\n".join([f"{title}:", *(f"  {name:<{width}}  {summary}" for name, summary in commands.items())])
        for title, commands in _GROUPS.items()
    )
    return "\n\n".join(groups)


def _unknown(command: str) -> str:
    similar = get_close_matches(command, COMMANDS, n=1)
    advice = f"did you mean {similar[0]}?" if similar else f"the commands are {', '.join(COMMANDS)}"
    return f"unknown command {command!r}; {advice}"


def _one_line(message: str) -> str:
    return " ".join(message.split())


def _split_program(given: list[str]) -> tuple[list[str], list[str] | None]:
    """Everything after the first `--` belongs to another program; argparse must not see it."""
    if "--" not in given:
        return given, None
    place = given.index("--")
    return given[:place], given[place + 1 :]


def _leave_at_once() -> NoReturn:
    """Exits without joining threads: one may be inside a botocore call of up to a minute that nobody awaits any more.
    Everything of ours is closed by now.
    """
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(INTERRUPTED)
