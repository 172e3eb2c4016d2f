"""The command line: one thin file for each command."""

from anabranch._cli.command_line import main

__all__ = ["main"]
