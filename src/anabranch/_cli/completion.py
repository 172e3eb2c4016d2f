"""`anabranch completion SHELL`: prints a script that lets a shell complete commands, options and files."""

import argparse
from collections.abc import Iterator
from typing import Final

from anabranch._cli.output import show_lines

_SHELLS: Final = ("bash", "zsh", "tcsh")
_EXAMPLES: Final = """\
examples:
  source <(anabranch completion bash)
  anabranch completion zsh > ~/.zfunc/_anabranch
  anabranch completion tcsh | source /dev/stdin

Put the first line into ~/.bashrc. For zsh, the folder must be in $fpath before
compinit runs.
"""


def add_completion(parser: argparse.ArgumentParser) -> None:
    parser.epilog = _EXAMPLES
    parser.set_defaults(work=_run)
    parser.add_argument("shell", choices=_SHELLS, metavar="SHELL", help=", ".join(_SHELLS))


def _run(arguments: argparse.Namespace) -> None:
    import shtab

    from anabranch._cli.command_line import load, make_parser

    files = {"DIR": shtab.DIRECTORY, "FILE": shtab.FILE, "FILE.svg": shtab.FILE}
    parser, subparsers = make_parser(for_completion=True)
    for name, subparser in subparsers.items():
        load(name)(subparser)
        for action in _actions(subparser):
            if action.metavar in files:
                action.complete = files[action.metavar]  # type: ignore[attr-defined]
    show_lines(shtab.complete(parser, shell=arguments.shell).splitlines())


def _actions(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    """The actions of a parser and of all its subparsers."""
    for action in parser._actions:  # noqa: SLF001 -- argparse has no public way to list them
        yield action
        if isinstance(action, argparse._SubParsersAction):  # noqa: SLF001 -- as above
            for nested in action.choices.values():
                yield from _actions(nested)
