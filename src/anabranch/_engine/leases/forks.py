"""A forked process is not the one that joined the fleet: what it has inherited of a membership ends there (rule L1).

The kernel copies a process whole, with its identity and its fence; both would pass for one member. So every member that
has joined is ended in the child, before any other code runs in it. What the child wants to read it must join for anew.
"""

import os
import weakref
from typing import Protocol

__all__ = ["end_in_forks"]


class _Membership(Protocol):
    def on_fork(self) -> None: ...


_joined: "weakref.WeakSet[_Membership]" = weakref.WeakSet()
"""Of this process: the hook below belongs to the process too, and cannot be taken back."""


def end_in_forks(membership: _Membership) -> None:
    _joined.add(membership)


def _after_fork_in_child() -> None:
    for membership in list(_joined):
        membership.on_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)
