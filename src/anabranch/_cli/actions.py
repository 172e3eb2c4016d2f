"""The actions of a command that has several: `anabranch streams ls`, `anabranch apps delete`.

Each is a parser of its own, with an example, and a function of its own that `perform` finds again.
"""

import argparse
from collections.abc import Callable

__all__ = ["Actions", "perform"]

_Work = Callable[[argparse.Namespace], int]


class Actions:
    def __init__(self, parser: argparse.ArgumentParser) -> None:
        self._command = parser.prog
        self._parsers = parser.add_subparsers(dest="action", metavar="ACTION", title="actions", required=True)

    def add(self, name: str, work: _Work, summary: str, *, example: str = "") -> argparse.ArgumentParser:
        """`example` is what stands behind the action's name there."""
        action = self._parsers.add_parser(
            name,
            help=summary,
            description=f"{summary[0].upper()}{summary[1:]}.",
            epilog=f"example:\n  {self._command} {name} {example}".rstrip(),
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        action.set_defaults(work=work)
        return action


def perform(arguments: argparse.Namespace) -> int:
    """The action that was asked for."""
    work: _Work = arguments.work
    return work(arguments)
