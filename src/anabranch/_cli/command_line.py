"""`anabranch COMMAND ...`: finds the command, gives it its arguments, and turns what goes wrong into an exit code.

A command is a module that fulfils `Command`, named in `COMMANDS`; only the one
that is asked for is imported. Exit codes: 0 done, 1 failed, 2 asked for something that cannot be, 130 interrupted.
"""

import argparse
import importlib
import sys
from collections.abc import Sequence
from typing import Final, Protocol, cast

from anabranch._version import __version__
from anabranch.errors import AnabranchError, ConfigurationError

__all__ = ["COMMANDS", "Command", "main"]

COMMANDS: Final[dict[str, tuple[str, str]]] = {
    "serve": ("anabranch._cli.serve", "run a local Kinesis that AWS SDKs can use"),
}
"""Name of a command to its module and its line in the help."""

_FAILED, _UNUSABLE, _INTERRUPTED = 1, 2, 130


class Command(Protocol):
    TAKES_PROGRAM: bool
    """Whether `-- PROGRAM ...` may follow; it is then `arguments.program`, which is None without one."""

    def add_arguments(self, parser: argparse.ArgumentParser, /) -> None: ...
    def run(self, arguments: argparse.Namespace, /) -> int: ...


def main(argv: Sequence[str] | None = None) -> int:
    given, program = _split_program(list(sys.argv[1:] if argv is None else argv))
    parser = argparse.ArgumentParser(prog="anabranch", description="Kinesis for Python.")
    parser.add_argument("--version", action="version", version=f"anabranch {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    chosen = next((word for word in given if not word.startswith("-")), None)
    command: Command | None = None
    for name, (module, summary) in COMMANDS.items():
        subparser = commands.add_parser(name, help=summary, description=f"{summary[0].upper()}{summary[1:]}.")
        if name == chosen:
            command = cast("Command", importlib.import_module(module))
            command.add_arguments(subparser)
    arguments = parser.parse_args(given)
    assert command is not None
    if program is not None and not command.TAKES_PROGRAM:
        parser.error(f"{arguments.command} runs no program: leave out what follows --")
    arguments.program = program
    try:
        return command.run(arguments)
    except ConfigurationError as error:
        for violation in error.violations:
            print(f"anabranch {arguments.command}: error: {violation}", file=sys.stderr)
        return _UNUSABLE
    except AnabranchError as error:
        print(f"anabranch {arguments.command}: {error}", file=sys.stderr)
        return _FAILED
    except KeyboardInterrupt:
        return _INTERRUPTED


def _split_program(given: list[str]) -> tuple[list[str], list[str] | None]:
    """What follows the first `--` is another program's, whatever argparse would make of it."""
    if "--" not in given:
        return given, None
    place = given.index("--")
    return given[:place], given[place + 1 :]
