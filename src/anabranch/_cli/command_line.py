"""`anabranch COMMAND ...`: finds the command, parses its arguments and turns errors into exit codes.

Each command in `COMMANDS` has a function `add_COMMAND(parser)`: it adds the arguments, and sets the parser's default
`work` to the function that runs the command. Only the module of the requested command is imported.
Exit codes: 0 done, 1 failed, 2 wrong usage, 130 interrupted. Data goes to standard output, everything else to standard
error. An error is one line that says what to do instead.
"""

import argparse
import contextlib
import importlib
import os
import signal
import sys
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from typing import Any, Final, NoReturn

from anabranch._cli.options import Work, add_parser, join_spans
from anabranch._cli.output import (
    DONE,
    FAILED,
    INTERRUPTED,
    WRONG_USAGE,
    OutputFailed,
    flush,
    one_line,
    prepare_streams,
    say,
    show_lines,
)
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
        "reshard": "change a stream's shard count, split a shard, merge two",
        "which-shard": "show which shard a partition key maps to",
    },
    "records": {
        "put": "write records: one, or one for each line of standard input",
        "tail": "show the records of a stream as they arrive",
    },
    "applications": {
        "run": "run your consumer, in one process or several",
        "apps": "list, show, move and delete applications, skip records",
        "top": "watch an application live: workers, shards, lag, rate",
        "explain": "explain why a shard is stalled",
        "dlq": "list, show, drop, export and redrive dead letters",
    },
    "your shell": {
        "completion": "print a shell completion script",
    },
}
COMMANDS: Final = {name: summary for commands in _GROUPS.values() for name, summary in commands.items()}
"""Command names, each with its line in the help."""
_MODULES: Final = {"which-shard": "shards", "reshard": "shards"}
"""The modules of commands that do not have one of their own name."""

_EPILOG: Final = """\
examples:
  anabranch demo                      see it work, without an AWS account
  anabranch serve --create orders:4   a local Kinesis to develop against
  anabranch doctor orders             check access to a stream
  anabranch tail orders --from -15m   the last 15 minutes

`anabranch COMMAND --help` has examples. Region, credentials and endpoint come
from the standard AWS environment and profile, or from each command's options.
Exit codes: 0 done, 1 failed, 2 wrong usage, 130 interrupted.
"""


class Parser(argparse.ArgumentParser):
    """Escapes control characters in its errors, which may quote user input, and reports if help cannot be printed."""

    def _print_message(self, message: str, file: Any = None) -> None:
        if file is not None and file is sys.stdout:
            show_lines(message.splitlines())
        else:
            super()._print_message(message, file)

    def error(self, message: str) -> NoReturn:
        self.print_usage(sys.stderr)
        say(f"{self.prog}: error: {message}")
        sys.exit(WRONG_USAGE)


def run_program(interrupt_handler: Any) -> int:
    """Runs the command line as a program. `interrupt_handler` is what SIGINT did before."""
    try:
        signal.signal(signal.SIGINT, interrupt_handler)
        _occupy_closed_descriptors()
        prepare_streams()
        code = main(sys.argv[1:])
    except KeyboardInterrupt:
        _exit_now()
    if interrupt_handler is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends the wait for threads
    return code


def main(given: Sequence[str]) -> int:
    """Returns the exit code."""
    try:
        try:
            return _run(list(given))
        finally:
            flush()
    except BrokenPipeError:  # the reader closed the pipe (`| head`)
        _discard_output()
        return FAILED
    except OutputFailed as error:
        say(f"anabranch: {one_line(error)}")
        _discard_output()
        return FAILED


def _occupy_closed_descriptors() -> None:
    """Opens the null device for closed streams. Otherwise sockets get their numbers, and children write to them."""
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)


def _discard_output() -> None:
    """Python tries to write the buffered output again at exit; the null device accepts it."""
    if sys.stdout is not None:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def make_parser(*, for_completion: bool = False) -> tuple[Parser, dict[str, argparse.ArgumentParser]]:
    """The parser, and each command's subparser by name. `load` adds the arguments of a command."""
    parser = Parser(
        prog="anabranch",
        usage="anabranch [-h] [--version] COMMAND ...",
        description=f"Reads and writes Amazon Kinesis Data Streams, and runs a local Kinesis.\n\n{_command_list()}",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"anabranch {__version__}")
    hidden = None if for_completion else argparse.SUPPRESS  # the description has the list
    commands = parser.add_subparsers(prog="anabranch", dest="command", help=hidden)
    return parser, {name: add_parser(commands, name, summary) for name, summary in COMMANDS.items()}


def load(name: str) -> Callable[[argparse.ArgumentParser], None]:
    """The function that adds the command's arguments to its parser."""
    module = importlib.import_module(f"anabranch._cli.{_MODULES.get(name, name)}")
    add_arguments: Callable[[argparse.ArgumentParser], None] = getattr(module, f"add_{name.replace('-', '_')}")
    return add_arguments


def _run(given: list[str]) -> int:
    parser, subparsers = make_parser()
    chosen = next((word for word in given if not word.startswith("-")), None)
    if given and given[0].startswith("-") and given[0] not in {"-h", "--help", "--version"}:
        parser.error(f"{given[0]} belongs after the command: anabranch COMMAND {given[0]} ...")
    if chosen is None:
        parser.parse_args(given)
        parser.print_help(sys.stderr)
        return WRONG_USAGE
    if chosen not in COMMANDS:
        parser.error(_unknown_command_error(chosen))
    subparser = subparsers[chosen]
    load(chosen)(subparser)
    program: list[str] | None = None
    if subparser.get_default("takes_program") and "--" in given:  # argparse must not see the other program's options
        place = given.index("--")
        given, program = given[:place], given[place + 1 :]
    arguments, unknown = parser.parse_known_args(join_spans(given), argparse.Namespace(program=program))
    if unknown:
        subparser.error(f"unrecognized arguments: {' '.join(unknown)}; `{subparser.prog} --help` lists the options")
    try:
        work: Work = arguments.work
        return work(arguments) or DONE
    except ConfigurationError as error:
        for violation in error.violations:
            say(f"anabranch {arguments.command}: error: {one_line(violation)}")
        return WRONG_USAGE
    except AnabranchError as error:
        say(f"anabranch {arguments.command}: {one_line(error)}")
        return FAILED


def _command_list() -> str:
    """The commands by group; argparse would print one long list and wrap the longest line."""
    width = max(map(len, COMMANDS))
    groups = (
        "\n".join([f"{title}:", *(f"  {name:<{width}}  {summary}" for name, summary in commands.items())])
        for title, commands in _GROUPS.items()
    )
    return "\n\n".join(groups)


def _unknown_command_error(command: str) -> str:
    similar = get_close_matches(command, COMMANDS, n=1)
    advice = f"did you mean {similar[0]}?" if similar else f"the commands are {', '.join(COMMANDS)}"
    return f"unknown command {command!r}; {advice}"


def _exit_now() -> NoReturn:
    """Exits without waiting for threads: one may still be in a botocore call, for up to a minute. All other resources
    are closed by now.
    """
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            with contextlib.suppress(OSError):
                stream.flush()
    os._exit(INTERRUPTED)
