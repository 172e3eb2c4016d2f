"""Proof that a process is gone: every member holds a lock on a file of its own (rule L17).

The kernel drops the lock with the process, however it ended, and keeps it for one that is merely stopped. So whoever
can lock the file of a live row knows that its member will never act again, and may seal it without waiting for its
expiry. The lock is taken before the row is written; a file that is missing proves nothing.

A lock belongs to the open file, which a forked child shares: the child closes its copies at once, or it would keep
the parent's lock alive.
"""

import fcntl
import hashlib
import os
from contextlib import suppress
from pathlib import Path
from urllib.parse import quote

__all__ = ["Presence"]

_NAME_BYTES_MAX = 200  # file systems allow 255
_locks_of_this_process: set[int] = set()  # descriptors, whatever became of the object that opened them


class Presence:
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._held: dict[str, int] = {}

    def announce(self, member_id: str) -> None:
        """Takes the member's lock, for as long as this process lives or until it is withdrawn."""
        if member_id in self._held:
            return
        self._folder.mkdir(exist_ok=True)
        descriptor = os.open(self._file(member_id), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:  # somebody holds it already, so it says "alive" as it should
            os.close(descriptor)
        else:
            self._held[member_id] = descriptor
            _locks_of_this_process.add(descriptor)

    def withdraw(self, member_id: str) -> None:
        """Gives up the lock of a member that has left, and removes the file of one that is no more."""
        with suppress(FileNotFoundError):
            self._file(member_id).unlink()
        if (descriptor := self._held.pop(member_id, None)) is not None:
            _release(descriptor)

    def is_dead(self, member_id: str) -> bool:
        """True only if the process is gone for certain."""
        if member_id in self._held:
            return False
        try:
            descriptor = os.open(self._file(member_id), os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return False
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)  # shared: two who look do not hinder each other
        except OSError:
            return False
        else:
            return True
        finally:
            os.close(descriptor)

    def close(self) -> None:
        for descriptor in self._held.values():
            _release(descriptor)
        self._held.clear()

    def _file(self, member_id: str) -> Path:
        name = quote(member_id, safe=" @:+")
        if len(name) > _NAME_BYTES_MAX:
            name = name[: _NAME_BYTES_MAX - 65] + "-" + hashlib.sha256(member_id.encode()).hexdigest()
        return self._folder / name


def _release(descriptor: int) -> None:
    if descriptor in _locks_of_this_process:  # a forked child has closed its copies, and may have reused the numbers
        _locks_of_this_process.remove(descriptor)
        os.close(descriptor)


def _close_after_fork() -> None:
    for descriptor in _locks_of_this_process:
        os.close(descriptor)
    _locks_of_this_process.clear()


os.register_at_fork(after_in_child=_close_after_fork)
