"""What happened in a run, told to the checkers as it happens.

Whoever runs a consumer tells the journal what was written to the stream, which handler calls started and finished, and
what the lease store took. The first violation is what matters: the others may follow from it.
"""

from collections.abc import Iterable

import msgspec

from anabranch._model.leases import LeaseRow
from anabranch._model.streams import Position

__all__ = ["Call", "Checker", "Commit", "Journal", "ShardOpened", "Violation", "Written", "place"]


def place(shard_id: str, incarnation: int) -> str:
    """A shard's name in the journal. A stream that is created anew has shards of the same names as before."""
    return shard_id + "'" * incarnation


class Violation(msgspec.Struct, frozen=True):
    at_ms: int
    promise: str
    what: str

    def __str__(self) -> str:
        return f"at {self.at_ms / 1000:.3f} s: {self.promise}: {self.what}"


class ShardOpened(msgspec.Struct, frozen=True):
    shard_id: str
    parents: tuple[str, ...] = ()


class Written(msgspec.Struct, frozen=True):
    """A record that the stream has taken. Sequence numbers grow along a line of descent, so they order a key's
    records.
    """

    shard_id: str
    position: Position
    partition_key: str


class Call(msgspec.Struct, frozen=True):
    """A handler call with one record, at its start or at its end."""

    at_ms: int
    process: str
    shard_id: str
    position: Position
    partition_key: str
    fence_token: int
    was_paused: bool = False
    """The process was stopped between the look at the clock and the call: no lease can prevent that (it has its fence
    token), so such a call counts for nothing here but as a zombie.
    """
    batch: int = 0
    """Calls of one number are one call of a batch handler: its records start, end and fail together. 0: by itself."""

    def __str__(self) -> str:
        return (
            f"{self.process} with token {self.fence_token}: {self.partition_key!r} at {self.shard_id}/{self.position}"
        )


class Commit(msgspec.Struct, frozen=True):
    """A lease row as the store took it."""

    at_ms: int
    row: LeaseRow
    incarnation: int = 0
    """How often the stream had been created anew before the one that this row is of."""

    @property
    def shard_id(self) -> str:
        return place(self.row.key.shard_id, self.incarnation)


class Checker:
    """One promise. Every method may be left as it is; `complain` where the promise is broken."""

    promise = ""

    def __init__(self) -> None:
        self.violations: list[Violation] = []

    def complain(self, at_ms: int, what: str) -> None:
        self.violations.append(Violation(at_ms, self.promise, what))

    def opened(self, shard: ShardOpened) -> None: ...
    def written(self, record: Written) -> None: ...
    def started(self, call: Call) -> None: ...
    def finished(self, call: Call) -> None: ...
    def abandoned(self, call: Call) -> None:
        """The call was cancelled: it has ended, and its record is not finished."""

    def excused(self, record: Written) -> None:
        """The stream has lost this record, and the consumer has said so."""

    def vanished(self, record: Written) -> None:
        """It went with its stream: nobody can handle it any more who has not read it."""

    def created(self, commit: Commit) -> None:
        """A lease row that was not there before."""

    def committed(self, commit: Commit) -> None: ...
    def owned(self, process: str | None, commit: Commit) -> None:
        """The lease row has another owner or fence token than before; `process` is that owner's, None if it is free."""

    def left(self, at_ms: int, member_id: str) -> None:
        """This member is over: it has asked the store to leave, or another has sealed it."""

    def died(self, at_ms: int, process: str) -> None:
        """A process runs no more, however it ended."""

    def hindered(self, process: str, from_ms: int, until_ms: int) -> None:
        """A process could not commit in this time: it did not run, or did not get a write to the store."""

    def halted(self, process: str, until_ms: int) -> None:
        """A process does not run until then."""

    def zombie(self, process: str, shard_id: str, position: Position) -> None:
        """A process has said that its call of this record runs although its lease may be another's."""

    def measured(self, at_ms: int, process: str, used_bytes: int, limit_bytes: int) -> None: ...
    def lost(self, process: str, shard_id: str) -> None:
        """A process has said that a shard is not its own any more, against its will."""

    def stopped(self, at_ms: int, process: str, used_bytes: int) -> None:
        """A process has ended in order, and left nothing behind; its budget should be whole again."""

    def succeeded(self, at_ms: int, process: str) -> None:
        """A process has ended by itself, at the tip, and has reported success."""

    def store_went_back(self) -> None:
        """The store has forgotten commits that it had taken: from now on less can be promised."""

    def store_emptied(self, processes: Iterable[str]) -> None:
        """The store has forgotten everything, `processes` were at work: an application that is none any more."""

    def made(self, at_ms: int, process: str, what: str) -> None:
        """A process has made something in the store, or found it made: the application, a stream, a lease."""

    def ended(self, at_ms: int) -> None:
        """The faults have been over for as long as everything should take to settle."""


class Journal:
    def __init__(self, checkers: Iterable[Checker]) -> None:
        self.checkers = list(checkers)
        self.is_closed = False
        """What happens while a run is taken down counts for nothing."""
        self.writes = 0
        self.starts = 0
        self.finishes = 0
        self.commits = 0
        self.zombies = 0
        self.excuses = 0
        """Records that are not to be waited for, whether they were finished or not."""
        self.has_forgotten_a_birth = False
        """The store has once forgotten that the application, or its stream, was begun."""
        self._orphans: dict[str, None] = {}
        self._failures: list[Violation] = []
        self._latest: dict[str, tuple[str, int]] = {}
        self._tokens: dict[str, int] = {}

    @property
    def violations(self) -> list[Violation]:
        found = [violation for checker in self.checkers for violation in checker.violations] + self._failures
        return sorted(found, key=lambda violation: violation.at_ms)

    def opened(self, shard: ShardOpened) -> None:
        for checker in self.checkers:
            checker.opened(shard)

    def written(self, record: Written) -> None:
        self.writes += 1
        for checker in self.checkers:
            checker.written(record)

    def started(self, call: Call) -> None:
        if self.is_closed:
            return
        self.starts += 1
        if self._is_zombie(call):
            self.zombies += 1
            return
        for checker in self.checkers:
            checker.started(call)

    def finished(self, call: Call) -> None:
        """A handler call returned. One that lost its lease while it ran has had its effect all the same."""
        if self.is_closed:
            return
        self.finishes += 1
        for checker in self.checkers:
            checker.finished(call)

    def abandoned(self, call: Call) -> None:
        for checker in self.checkers:
            checker.abandoned(call)

    def excused(self, record: Written) -> None:
        self.excuses += 1
        for checker in self.checkers:
            checker.excused(record)

    def vanished(self, record: Written) -> None:
        self.excuses += 1
        for checker in self.checkers:
            checker.vanished(record)

    def created(self, commit: Commit) -> None:
        if not self.is_closed:
            for checker in self.checkers:
                checker.created(commit)

    def lost(self, process: str, shard_id: str) -> None:
        for checker in self.checkers:
            checker.lost(process, shard_id)

    def stopped(self, at_ms: int, process: str, used_bytes: int) -> None:
        if not self.is_closed:
            for checker in self.checkers:
                checker.stopped(at_ms, process, used_bytes)

    def committed(self, commit: Commit) -> None:
        if self.is_closed:
            return
        self.commits += 1
        for checker in self.checkers:
            checker.committed(commit)

    def owned(self, process: str | None, commit: Commit) -> None:
        for checker in self.checkers:
            checker.owned(process, commit)

    def left(self, at_ms: int, member_id: str) -> None:
        for checker in self.checkers:
            checker.left(at_ms, member_id)

    def died(self, at_ms: int, process: str) -> None:
        for checker in self.checkers:
            checker.died(at_ms, process)

    def hindered(self, process: str, from_ms: int, until_ms: int) -> None:
        for checker in self.checkers:
            checker.hindered(process, from_ms, until_ms)

    def halted(self, process: str, until_ms: int) -> None:
        for checker in self.checkers:
            checker.halted(process, until_ms)

    def zombie(self, process: str, shard_id: str, position: Position) -> None:
        for checker in self.checkers:
            checker.zombie(process, shard_id, position)

    def measured(self, at_ms: int, process: str, used_bytes: int, limit_bytes: int) -> None:
        for checker in self.checkers:
            checker.measured(at_ms, process, used_bytes, limit_bytes)

    def succeeded(self, at_ms: int, process: str) -> None:
        if not self.is_closed:
            for checker in self.checkers:
                checker.succeeded(at_ms, process)

    def store_went_back(self) -> None:
        for checker in self.checkers:
            checker.store_went_back()

    def store_emptied(self, processes: Iterable[str]) -> None:
        """What these processes start from now on, until they notice, counts for nothing: nobody can know of them."""
        self.has_forgotten_a_birth = True
        self._orphans |= dict.fromkeys(processes)
        self.store_went_back()
        for checker in self.checkers:
            checker.store_emptied(self._orphans)

    def made(self, at_ms: int, process: str, what: str) -> None:
        if not self.is_closed:
            for checker in self.checkers:
                checker.made(at_ms, process, what)

    def failed(self, at_ms: int, what: str) -> None:
        """Something in the background ended in an error that nobody saw (P7)."""
        if not self.is_closed:
            self._failures.append(Violation(at_ms, "nothing ends unseen", what))

    def ended(self, at_ms: int) -> None:
        for checker in self.checkers:
            checker.ended(at_ms)

    def _is_zombie(self, call: Call) -> bool:
        """Whether it was paused before it started, and another owner has started something of its shard since; or its
        application is gone.
        """
        if call.process in self._orphans:
            return True
        holding, latest = (call.process, call.fence_token), self._latest.get(call.shard_id)
        highest = self._tokens.get(call.partition_key, 0)
        if call.was_paused and (call.fence_token < highest or latest not in {None, holding}):
            return True
        self._latest[call.shard_id] = holding
        self._tokens[call.partition_key] = max(highest, call.fence_token)
        return False
