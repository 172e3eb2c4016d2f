"""How a command ends: its exit code, and the failure that is one line of advice."""

from typing import Final

from anabranch.errors import AnabranchError

__all__ = ["DONE", "FAILED", "INTERRUPTED", "UNUSABLE", "CommandFailed"]

DONE: Final = 0
FAILED: Final = 1
UNUSABLE: Final = 2
"""Asked for something that cannot be."""
INTERRUPTED: Final = 130
"""As a shell reports Ctrl-C."""


class CommandFailed(AnabranchError):  # noqa: N818 -- an outcome, not a fault of the program
    """The command could not do what was asked."""
