"""The facts of a run, and the journal that passes each fact to the checkers.

The program that runs a consumer tells the journal what was written to the stream, which handler calls started and
ended, and what the lease store accepted. Read the first violation first: later ones may follow from it.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable

import msgspec

from anabranch._model.leases import LeaseRow
from anabranch._model.streams import Position


def incarnation_name(name: str, incarnation: int) -> str:
    """The journal's name of a shard or a partition key. A stream that is created again has shards with the same ids
    as before, and nothing is promised about the order of a key across the two.
    """
    return name + "'" * incarnation


class Violation(msgspec.Struct, frozen=True):
    at_ms: int
    promise: str
    what: str

    def __str__(self) -> str:
        return f"at {self.at_ms / 1000:.3f} s: {self.promise}: {self.what}"


class StreamRecord(msgspec.Struct, frozen=True):
    """A record in the stream. Sequence numbers grow from parent to child shards, so they order a key's records."""

    shard_id: str
    position: Position
    partition_key: str


class RecordCall(msgspec.Struct, frozen=True):
    """A handler call with one record, at its start or at its end."""

    at_ms: int
    process: str
    shard_id: str
    position: Position
    partition_key: str
    fence_token: int
    was_paused: bool = False
    """The process was paused between the check of the fence and the call. No lease can prevent that, only the fence
    token can: if another owner has started meanwhile, the call is counted as a zombie and not checked.
    """
    batch: int = 0
    """Calls with the same number are one call of a batch handler: its records start, end and fail together. 0: a
    call with a single record.
    """
    attempt: int = 0
    """Which attempt at this record it is, as the handler sees it; 0 if unknown."""

    @property
    def owner(self) -> tuple[str, int]:
        return (self.process, self.fence_token)

    @property
    def holding(self) -> tuple[str, str, int]:
        """With the shard: after the store went back, two shards may have the same fence token."""
        return (self.process, self.shard_id, self.fence_token)

    def __str__(self) -> str:
        return (
            f"{self.process} with token {self.fence_token}: {self.partition_key!r} at {self.shard_id}/{self.position}"
        )


class LeaseWrite(msgspec.Struct, frozen=True):
    """A lease row as the store accepted it."""

    at_ms: int
    row: LeaseRow
    incarnation: int = 0
    """How many times the stream had been created again before this row was made."""

    @property
    def shard_id(self) -> str:
        return incarnation_name(self.row.key.shard_id, self.incarnation)


class Fact(msgspec.Struct, frozen=True):
    """Something that happened. Each subclass is one kind of fact."""


class ProcessFact(Fact, frozen=True):
    """Something that a process did, or that happened to it."""

    at_ms: int
    process: str


# the stream


class ShardOpened(Fact, frozen=True):
    shard_id: str
    parents: tuple[str, ...] = ()


class RecordWritten(Fact, frozen=True):
    record: StreamRecord


class RecordExcused(Fact, frozen=True):
    """The stream trimmed this record, and the consumer reported the loss."""

    record: StreamRecord


class RecordUnreadable(Fact, frozen=True):
    """The record was trimmed with its shard, and only then the shard got a lease. So no other record has to wait for
    this one, but the loss must still be reported.
    """

    record: StreamRecord


class RecordDeleted(Fact, frozen=True):
    """The record was deleted with its stream. Only a process that has already read it can still handle it."""

    record: StreamRecord


# handler calls


class CallStarted(Fact, frozen=True):
    call: RecordCall


class CallFinished(Fact, frozen=True):
    """The call returned. It had its effect, even if its process lost the lease while it ran."""

    call: RecordCall


class CallAbandoned(Fact, frozen=True):
    """The call raised or was cancelled: it has ended, and its record is not finished."""

    call: RecordCall


class LetterWritten(ProcessFact, frozen=True):
    """The dead letters have this record, durably. It is finished, and its handler is not called again."""

    record: StreamRecord
    idempotency_key: str


class SkipReported(ProcessFact, frozen=True):
    """The process reported that it skipped this record."""

    record: StreamRecord


class ZombieReported(Fact, frozen=True):
    """The process reported that its call with this record still runs, although another worker may own the lease."""

    process: str
    shard_id: str
    position: Position


class BytesMeasured(ProcessFact, frozen=True):
    used_bytes: int
    peak_bytes: int
    """The most that was used at any time until now."""
    limit_bytes: int


class BytesReceived(ProcessFact, frozen=True):
    """The body of a response begins to arrive at the process."""

    received_bytes: int
    """All bodies that are arriving now."""
    counted_bytes: int
    """What its budget counts now."""


# the lease store


class LeaseCreated(Fact, frozen=True):
    write: LeaseWrite


class LeaseCommitted(Fact, frozen=True):
    """The owner wrote its lease row."""

    write: LeaseWrite


class OwnerChanged(Fact, frozen=True):
    """The lease row has a new owner or fence token."""

    write: LeaseWrite
    process: str | None
    """The owner's process; None if the lease is free."""


class MemberLeft(Fact, frozen=True):
    """The member asked the store to leave, or another member sealed it."""

    at_ms: int
    member_id: str


class LeaseDeleted(Fact, frozen=True):
    """Somebody deleted a lease row: its shard may be handled again from an earlier position."""

    shard_id: str
    row: LeaseRow


class StoreWentBack(Fact, frozen=True):
    """The store lost writes that it had accepted. From now on, repeats and fence tokens that go back are allowed."""


class StoreEmptied(StoreWentBack, frozen=True):
    """The store lost everything while these processes were running."""

    processes: tuple[str, ...]


# processes


class LeaseLossReported(Fact, frozen=True):
    """The process reported that it lost a shard's lease."""

    process: str
    shard_id: str


class CommitsBlocked(Fact, frozen=True):
    """The process could not commit in this time: it did not run, or its writes did not reach the store."""

    process: str
    from_ms: int
    until_ms: int


class ProcessHalted(Fact, frozen=True):
    """The process does not run until then."""

    process: str
    until_ms: int


class ProcessDied(ProcessFact, frozen=True):
    """The process has ended, for whatever reason."""


class CleanStop(ProcessFact, frozen=True):
    """The process stopped gracefully: it committed everything and released its leases."""

    used_bytes: int
    """What is still charged to its budget."""


class SuccessReported(ProcessFact, frozen=True):
    """The process reached the tip, ended by itself and reported success."""


class UnseenError(Fact, frozen=True):
    """A background task ended in an error that nobody saw, or a worker ended in an error that nothing explains."""

    at_ms: int
    what: str


class RunEnded(Fact, frozen=True):
    """The faults ended long enough ago that all work should be done."""

    at_ms: int


class Checker(ABC):
    """Checks one promise. `tell` matches the facts that matter to it and ignores the others."""

    promise = ""

    def __init__(self) -> None:
        self.violations: list[Violation] = []

    @abstractmethod
    def tell(self, fact: Fact) -> None: ...

    def complain(self, at_ms: int, what: str) -> None:
        self.violations.append(Violation(at_ms, self.promise, what))


class Journal:
    def __init__(self, checkers: Iterable[Checker]) -> None:
        self.checkers = list(checkers)
        self.is_closed = False
        """The run is being torn down: nothing that happens now is checked."""
        self.writes = 0
        self.starts = 0
        self.finishes = 0
        self.commits = 0
        self.zombies = 0
        self.letters: dict[StreamRecord, None] = {}
        self.skips: dict[StreamRecord, None] = {}
        self.excuses = 0
        """Records that nobody has to handle any more. Some of them were finished."""
        self._orphans: dict[str, None] = {}
        """Processes that were running when the store was emptied."""
        self._holders: dict[str, tuple[str, int]] = {}
        """Who last started a record of each shard: process and fence token."""
        self._tokens: dict[str, int] = {}
        """The highest fence token that each partition key was started with."""

    @property
    def violations(self) -> list[Violation]:
        found = [violation for checker in self.checkers for violation in checker.violations]
        return sorted(found, key=lambda violation: violation.at_ms)

    def tell(self, fact: Fact) -> None:
        if self.is_closed:
            return
        match fact:
            case RecordWritten():
                self.writes += 1
            case RecordExcused() | RecordDeleted():
                self.excuses += 1
            case CallStarted(call):
                self.starts += 1
                if self._is_zombie(call):
                    self.zombies += 1
                    return
            case CallFinished():
                self.finishes += 1
            case LetterWritten(_, _, record):
                self.letters[record] = None
            case SkipReported(_, _, record):
                self.skips[record] = None
            case LeaseCommitted():
                self.commits += 1
            case StoreEmptied(processes):
                self._orphans |= dict.fromkeys(processes)
        for checker in self.checkers:
            checker.tell(fact)

    def _is_zombie(self, call: RecordCall) -> bool:
        """Whether no lease could have prevented this call: its process was paused right before it while another owner
        started, or the store lost the application of its process.
        """
        if call.process in self._orphans:
            return True
        latest = self._holders.get(call.shard_id)
        highest = self._tokens.get(call.partition_key, 0)
        if call.was_paused and (call.fence_token < highest or latest not in {None, call.owner}):
            return True
        self._holders[call.shard_id] = call.owner
        self._tokens[call.partition_key] = max(highest, call.fence_token)
        return False
