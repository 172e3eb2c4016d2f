"""`anabranch COMMAND ...`: finds the command, gives it its arguments, and turns what goes wrong into an exit code.

A command is a module that fulfils `Command`, named in `COMMANDS`; only the one that is asked for is imported.
Exit codes: 0 done, 1 failed, 2 asked for something that cannot be, 130 interrupted. Data goes to standard output, all
else to standard error; an error is a line that says what would be right.
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

__all__ = ["COMMANDS", "Command", "main"]

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
        "which-shard": "say which shard a partition key goes to",
    },
    "records": {
        "put": "write records: one, or one for each line of standard input",
        "tail": "show the records of a stream as they come",
    },
    "applications": {
        "run": "run a consumer of yours, also as several processes",
        "apps": "list, show and delete applications: their workers and positions",
        "top": "watch an application live: workers, shards, lag, rate",
        "explain": "say in words why a shard does or does not move",
    },
}
COMMANDS: Final = {name: summary for commands in _GROUPS.values() for name, summary in commands.items()}
"""Each is the module of its name here, and has this line in the help."""

_EPILOG: Final = """\
examples:
  anabranch demo                      the whole product, without an AWS account
  anabranch serve --create orders:4   a local Kinesis to develop against
  anabranch doctor orders             what is missing to use a stream
  anabranch tail orders --from -15m   what came in the last quarter of an hour

`anabranch COMMAND --help` has examples. Region, credentials and endpoint come
from the standard AWS environment and profile, or from each command's options.
Exit codes: 0 done, 1 failed, 2 wrong usage, 130 interrupted.
"""


class Command(Protocol):
    """A module may also say `TAKES_PROGRAM = True`: what follows `--` is `arguments.program` then, None without it."""

    def add_arguments(self, parser: argparse.ArgumentParser, /) -> None: ...
    def run(self, arguments: argparse.Namespace, /) -> int: ...


def main(argv: Sequence[str] | None = None) -> int:
    """The exit code. Without `argv` this process is the program, and an interruption ends it at once."""
    if argv is None:
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, io.TextIOWrapper):
                stream.reconfigure(errors="backslashreplace")  # a key that cannot be shown is no reason to fail
    given = list(sys.argv[1:] if argv is None else argv)
    try:
        code = _run(given)
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        # Whoever read our output has seen enough (`| head`); what is still buffered goes nowhere.
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
        parser.error(f"{given[0]} comes after the command, if that has it: anabranch COMMAND {given[0]} ...")
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
        asked.error(f"unrecognized arguments: {' '.join(unknown)}; `{asked.prog} --help` lists what there is")
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
    """The commands by their groups: argparse lists them in one piece, and breaks the line of the longest."""
    width = max(map(len, COMMANDS))
    groups = (
        "\n".join([f"{title}:", *(f"  {name:<{width}}  {summary}" for name, summary in commands.items())])
        for title, commands in _GROUPS.items()
    )
    return "\n\n".join(groups)


def _unknown(command: str) -> str:
    similar = get_close_matches(command, COMMANDS, n=1)
    advice = f"did you mean {similar[0]}?" if similar else f"there are {', '.join(COMMANDS)}"
    return f"there is no command {command!r}; {advice}"


def _one_line(message: str) -> str:
    return " ".join(message.split())


def _split_program(given: list[str]) -> tuple[list[str], list[str] | None]:
    """What follows the first `--` is another program's, whatever argparse would make of it."""
    if "--" not in given:
        return given, None
    place = given.index("--")
    return given[:place], given[place + 1 :]


def _leave_at_once() -> NoReturn:
    """A thread may be inside a call that no one waits for any more (botocore's take up to a minute); Python would join
    it before it ends. Everything of ours is closed by now.
    """
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(INTERRUPTED)
