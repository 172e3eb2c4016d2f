"""The command line: one file per command."""

from anabranch._cli.command_line import main

__all__ = ["main"]
