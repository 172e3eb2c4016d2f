"""The promises (README, "Promises") as checkers, one class each.

A checker judges the facts of a run (`journal.py`): what was written, started, finished and committed. It knows nothing
about how the engine works, so a mistake in the engine cannot also be in the checker.
"""

import hashlib
from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

from anabranch._model.leases import Checkpoint, LeaseRow, Stopped
from anabranch._model.streams import Position
from anabranch.testing import journal as facts


def all_checkers(*, keeps_order: bool = True, commit_ms: int = 1_000) -> list[facts.Checker]:
    """A checker for each promise of a consumer; without that of order if `keeps_order` is false. A process that can
    commit must commit a finished record within `commit_ms`.
    """
    return [
        *([OrderPerKey()] if keeps_order else []),
        NoLoss(),
        OneOutcome(),
        AttemptsSurvive(),
        FewDuplicates(commit_ms),
        OneOwner(),
        NoOverlap(),
        QuietTransfers(),
        WithinBudget(),
        NoStandstill(),
        NoFalseSuccess(),
        ParentsFirst(),
        ChildrenFirst(),
        CheckpointAdvances(),
        NoSilentFailures(),
    ]


def covers(checkpoint: Checkpoint, position: Position, partition_key: str) -> bool:
    """Whether the checkpoint says that this record is finished. Everything up to the watermark is. Between the
    watermark and the frontier, a record is finished unless its key is open there, from the key's first open record on.
    """
    if checkpoint.watermark is None:
        return False
    if position <= checkpoint.watermark:
        return True
    if checkpoint.frontier is None or position > checkpoint.frontier:
        return False
    text = str(position) if checkpoint.order == "none" else partition_key
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return all(key.digest != digest or position < key.first_open for key in checkpoint.open_keys)


class _UnfinishedRecords(facts.Checker):
    """Knows which written records are unfinished: not handled, dead-lettered, skipped or excused."""

    def __init__(self) -> None:
        super().__init__()
        self.unfinished: dict[str, dict[Position, facts.StreamRecord]] = {}
        """By shard."""

    def tell(self, fact: facts.Fact) -> None:
        match fact:
            case facts.RecordWritten(record):
                self.unfinished.setdefault(record.shard_id, {})[record.position] = record
            case (
                facts.CallFinished(one)
                | facts.RecordExcused(one)
                | facts.LetterWritten(record=one)
                | facts.SkipReported(record=one)
            ):
                self.unfinished[one.shard_id].pop(one.position, None)


# P1, order


class _KeyOrder:
    """The records of one partition key."""

    def __init__(self) -> None:
        self.written: list[Position] = []
        self.finished: dict[Position, None] = {}
        self.finished_count = 0
        """How many of the written records, from the first on, are finished."""
        self.running: dict[tuple[str, str, int], dict[Position, int]] = {}
        """By holding, with the number of each call's batch."""
        self.last_started: dict[tuple[str, str, int], Position] = {}
        """By holding."""

    def finish(self, position: Position) -> None:
        self.finished[position] = None
        while self.finished_count < len(self.written) and self.written[self.finished_count] in self.finished:
            self.finished_count += 1

    def first_unfinished_before(self, position: Position, batch: dict[Position, int]) -> Position | None:
        """Ignores the records of the same batch."""
        for index in range(self.finished_count, bisect_left(self.written, position)):
            before = self.written[index]
            if before not in self.finished and before not in batch:
                return before
        return None


class OrderPerKey(facts.Checker):
    """P1: no record is started for the first time before all earlier records of its key are finished. One owner's calls
    of a key come in stream order, one at a time. The records of one batch count as one call.
    """

    promise = "order"

    def __init__(self) -> None:
        super().__init__()
        self._keys: defaultdict[str, _KeyOrder] = defaultdict(_KeyOrder)

    def tell(self, fact: facts.Fact) -> None:
        match fact:
            case facts.RecordWritten(record):
                insort(self._keys[record.partition_key].written, record.position)
            case (
                facts.RecordExcused(record)
                | facts.RecordUnreadable(record)
                | facts.LetterWritten(record=record)
                | facts.SkipReported(record=record)
            ):
                self._keys[record.partition_key].finish(record.position)
            case facts.CallStarted(call):
                self._start(call)
            case facts.CallFinished(call):
                self._end(call)
                self._keys[call.partition_key].finish(call.position)
            case facts.CallAbandoned(call):
                self._end(call)
                # The record is retried, and so are the records after it in its batch.
                last = self._keys[call.partition_key].last_started
                if call.holding in last:
                    last[call.holding] = min(last[call.holding], call.position)

    def _start(self, call: facts.RecordCall) -> None:
        key, holding = self._keys[call.partition_key], call.holding
        running = key.running.setdefault(holding, {})
        same_batch = {position: batch for position, batch in running.items() if batch and batch == call.batch}
        if (earlier := key.first_unfinished_before(call.position, same_batch)) is not None:
            self.complain(call.at_ms, f"{call} starts, but {earlier} of its key was not finished")
        if len(same_batch) < len(running):
            other = next(position for position in running if position not in same_batch)
            self.complain(call.at_ms, f"{call} starts while {other} of its key is running")
        if (before := key.last_started.get(holding)) is not None and call.position < before:
            self.complain(call.at_ms, f"{call} starts after {before} by the same owner")
        running[call.position] = call.batch
        key.last_started[holding] = call.position

    def _end(self, call: facts.RecordCall) -> None:
        self._keys[call.partition_key].running.get(call.holding, {}).pop(call.position, None)


class ParentsFirst(_UnfinishedRecords):
    """P1 across resharding: no record of a shard is started before all records of its parents are finished."""

    promise = "parents first"

    def __init__(self) -> None:
        super().__init__()
        self._parents: dict[str, tuple[str, ...]] = {}

    def tell(self, fact: facts.Fact) -> None:
        super().tell(fact)
        match fact:
            case facts.ShardOpened(shard_id, parents):
                self._parents[shard_id] = parents
            case facts.RecordUnreadable(record):
                self.unfinished[record.shard_id].pop(record.position, None)
            case facts.CallStarted(call):
                for parent in self._parents.get(call.shard_id, ()):
                    if left := self.unfinished.get(parent):
                        what = f"{call} starts, but {len(left)} records of its parent {parent} are unfinished"
                        self.complain(call.at_ms, what)


# P2, no loss


class NoLoss(_UnfinishedRecords):
    """P2: no committed checkpoint covers an unfinished record."""

    promise = "no loss"

    def tell(self, fact: facts.Fact) -> None:
        super().tell(fact)
        if isinstance(fact, facts.LeaseCommitted):
            self._check_commit(fact.write)

    def _check_commit(self, write: facts.LeaseWrite) -> None:
        row = write.row
        for record in self.unfinished.get(write.shard_id, {}).values():
            if row.is_finished or covers(row.checkpoint, record.position, record.partition_key):
                self.complain(
                    write.at_ms,
                    f"{write.shard_id} is committed up to {row.checkpoint.watermark}, but {record.partition_key!r} "
                    f"at {record.position} was not finished",
                )
                return


class OneOutcome(facts.Checker):
    """A dead letter has one idempotency key, and the key belongs to one record. The handler is not called again for
    that record, also not by a later owner of the shard (rule D1), unless the store has lost writes.
    """

    promise = "one outcome"

    def __init__(self) -> None:
        super().__init__()
        self._keys: dict[str, dict[Position, str]] = {}
        """By shard."""
        self._records: dict[str, tuple[str, Position]] = {}
        self._store_remembers = True

    def tell(self, fact: facts.Fact) -> None:
        match fact:
            case facts.StoreWentBack():
                self._store_remembers = False
            case facts.LeaseCreated(write):  # again, if somebody has deleted the row
                self._keys.pop(write.shard_id, None)
            case facts.LetterWritten(at_ms, process, record, key):
                if self._keys.setdefault(record.shard_id, {}).setdefault(record.position, key) != key:
                    self.complain(at_ms, f"{process} writes a second letter of {record} with another key")
                place = (record.shard_id, record.position)
                if self._records.setdefault(key, place) != place:
                    self.complain(at_ms, f"{process} writes a letter of {record} with the key of another record")
            case facts.CallStarted(call) if self._store_remembers:
                if call.position in self._keys.get(call.shard_id, {}):
                    self.complain(call.at_ms, f"{call} starts although its record is in the dead letters")


class AttemptsSurvive(facts.Checker):
    """Failed attempts that are committed count under every owner (rule M5): otherwise a record could outlive any number
    of attempts by outliving its owners.
    """

    promise = "attempts survive"

    def __init__(self) -> None:
        super().__init__()
        self._committed: dict[str, dict[Position, int]] = {}
        """By shard."""

    def tell(self, fact: facts.Fact) -> None:
        match fact:
            case facts.LeaseCommitted(write):
                counts = {key.first_open: key.attempts for key in write.row.checkpoint.open_keys if key.attempts}
                self._committed.setdefault(write.shard_id, {}).update(counts)
            case facts.StoreWentBack():
                self._committed.clear()
            case facts.LeaseCreated(write):  # again, if somebody has deleted the row
                self._committed.pop(write.shard_id, None)
            case facts.CallStarted(call) if call.attempt and not call.batch:
                failed = self._committed.get(call.shard_id, {}).get(call.position, 0)
                if call.attempt <= failed:
                    what = f"{call} is attempt {call.attempt}, but {failed} failed ones were committed"
                    self.complain(call.at_ms, what)


class ChildrenFirst(facts.Checker):
    """P2 across resharding: the lease rows of a shard's children exist before the shard is written as finished.
    Otherwise a crash in between loses the children.
    """

    promise = "children before the end"

    def __init__(self) -> None:
        super().__init__()
        self._created: dict[str, None] = {}

    def tell(self, fact: facts.Fact) -> None:
        match fact:
            case facts.LeaseCreated(write):
                self._created[write.shard_id] = None
            case facts.LeaseCommitted(write) if write.row.finish is not None:
                children = [facts.incarnation_name(child, write.incarnation) for child in write.row.finish.children]
                if missing := [child for child in children if child not in self._created]:
                    self.complain(write.at_ms, f"{write.shard_id} is finished, but {missing[0]} has no row")


class CheckpointAdvances(facts.Checker):
    """A shard's checkpoint only advances, its version and epoch only grow, and its end is final."""

    promise = "checkpoints advance"

    def __init__(self) -> None:
        super().__init__()
        self._rows: dict[object, LeaseRow] = {}

    def tell(self, fact: facts.Fact) -> None:
        match fact:
            case facts.LeaseCommitted(write):
                before = self._rows.get(write.row.key)
                self._rows[write.row.key] = write.row
                if before is not None:
                    self._compare(before, write)
            case facts.LeaseDeleted(_, row):
                self._rows.pop(row.key, None)
            case facts.StoreWentBack():
                self._rows.clear()

    def _compare(self, before: LeaseRow, write: facts.LeaseWrite) -> None:
        row, shard_id, old, new = write.row, write.shard_id, before.checkpoint, write.row.checkpoint
        goes_back = old.watermark is not None and (new.watermark is None or new.watermark < old.watermark)
        if goes_back and new.seek_epoch == old.seek_epoch:
            self.complain(write.at_ms, f"{shard_id} goes back from {old.watermark} to {new.watermark}")
        if row.version <= before.version or row.epoch < before.epoch:
            self.complain(write.at_ms, f"{shard_id} goes back to version {row.version}, epoch {row.epoch}")
        if before.is_finished:
            self.complain(write.at_ms, f"{shard_id} is written after its end")


# P3, few duplicates

OPEN_RECORDS_MAX = 1_000
"""How many open records a lease row can name."""


class _ShardHolding:
    """The time in which one process owns one shard, as the store's rows show it."""

    def __init__(self, process: str, member_id: str, fence_token: int) -> None:
        self.process = process
        self.member_id = member_id
        self.fence_token = fence_token
        self.ended_ms: int | None = None
        self.was_given = False
        """The owner ended it by its own write, which must contain everything that was finished."""
        self.open: dict[Position, None] = {}
        """Records that were started and are not finished."""
        self.finished_ms: dict[Position, int] = {}
        """When the records finished that must be committed."""

    def finish(self, position: Position, at_ms: int) -> None:
        self.open.pop(position, None)
        if len(self.open) <= OPEN_RECORDS_MAX or sum(other < position for other in self.open) <= OPEN_RECORDS_MAX:
            self.finished_ms.setdefault(position, at_ms)

    def end(self, at_ms: int) -> None:
        if self.ended_ms is None:
            self.ended_ms = at_ms


class FewDuplicates(facts.Checker):
    """P3: no record is handled again that was committed, or that finished so long ago that it should have been. After a
    clean stop or a hand-off, no finished record is handled again.

    A record should have been committed if its process could commit for `commit_ms` without interruption since it
    finished. It could not commit in these cases, whatever the engine itself reports:

    - the process did not run (it was paused, or its event loop stalled);
    - the store was down, or the process was cut off from it;
    - a message of one of its lease writes was lost or late: for as long as one store call may take, from when that
      message was sent;
    - it no longer had the lease: the process had ended, its member had asked to leave or was sealed, the row had
      another owner, or the store had been rolled back or emptied;
    - the shard was written as stopped, which is its last write (rule D4);
    - more records of the shard before this one were open than a lease row can name (rule M1).
    """

    promise = "few duplicates"

    def __init__(self, commit_ms: int = 1_000) -> None:
        super().__init__()
        self._commit_ms = commit_ms
        self._holdings: dict[str, list[_ShardHolding]] = {}
        """By shard, the latest last."""
        self._blocked: dict[str, list[tuple[int, int]]] = {}
        """When each process could not commit."""
        self._committed: dict[str, Checkpoint] = {}
        self._inherited: dict[str, dict[int, Checkpoint]] = {}
        """The checkpoint at the start of each holding, by shard and fence token."""
        self._finished_by: dict[str, dict[str, dict[Position, None]]] = {}
        """What each process has finished in shards that it did not lose, by process and shard."""
        self._tokens: dict[tuple[str, str], int] = {}
        """The fence token with which each process last started a record of a shard."""
        self._lost: dict[tuple[str, str], int] = {}
        """The fence token with which each process last lost a shard: it cannot commit with it any more."""
        self._settled: dict[str, dict[Position, str]] = {}
        """What was finished by a process before its clean stop, by shard, with the name of the process."""

    def tell(self, fact: facts.Fact) -> None:
        match fact:
            case facts.CallStarted(call):
                self._start(call)
            case facts.CallFinished(call):
                self._finish(call)
            case facts.LeaseCommitted(write):
                self._commit(write)
            case facts.OwnerChanged(write, process):
                self._change_owner(write, process)
            case facts.MemberLeft(at_ms, member_id):
                for holding in self._all_holdings():
                    if holding.member_id == member_id:
                        holding.end(at_ms)
            case facts.ProcessDied(at_ms, process):
                for holding in self._all_holdings():
                    if holding.process == process:
                        holding.end(at_ms)
            case facts.CommitsBlocked(process, from_ms, until_ms):
                self._blocked.setdefault(process, []).append((from_ms, until_ms))
            case facts.LeaseLossReported(process, shard_id):
                self._lost[(process, shard_id)] = self._tokens.get((process, shard_id), -1)
                self._finished_by.get(process, {}).pop(shard_id, None)
            case facts.CleanStop(_, process, _):
                for shard_id, positions in self._finished_by.get(process, {}).items():
                    self._settled.setdefault(shard_id, {}).update(dict.fromkeys(positions, process))
            case facts.LeaseDeleted(shard_id):
                self._forget(shard_id)
            case facts.StoreWentBack():
                self._committed.clear()
                self._inherited.clear()
                self._finished_by.clear()
                self._settled.clear()
                self._holdings.clear()

    def _forget(self, shard_id: str) -> None:
        """What was committed counts again from the next commit on."""
        by_shard: list[dict[str, Any]] = [self._committed, self._holdings, self._inherited, self._settled]
        for known in (*by_shard, *self._finished_by.values()):
            known.pop(shard_id, None)

    def _start(self, call: facts.RecordCall) -> None:
        shard_id = call.shard_id
        self._tokens[(call.process, shard_id)] = call.fence_token
        committed = self._committed.get(shard_id, Checkpoint())
        inherited = self._inherited.setdefault(shard_id, {}).setdefault(call.fence_token, committed)
        if covers(inherited, call.position, call.partition_key):
            self.complain(call.at_ms, f"{call} is handled again although it was committed")
        elif (process := self._settled.get(shard_id, {}).get(call.position)) is not None:
            self.complain(call.at_ms, f"{call} is handled again although {process} finished it before its clean stop")
        else:
            self._check_earlier_holdings(call)
        if (mine := self._holding_of(call)) is not None:
            mine.open[call.position] = None

    def _finish(self, call: facts.RecordCall) -> None:
        if call.fence_token > self._lost.get((call.process, call.shard_id), -1):
            self._finished_by.setdefault(call.process, {}).setdefault(call.shard_id, {})[call.position] = None
        if (mine := self._holding_of(call)) is not None:
            mine.finish(call.position, call.at_ms)

    def _commit(self, write: facts.LeaseWrite) -> None:
        self._committed[write.shard_id] = write.row.checkpoint
        holding = self._last_holding(write.shard_id)
        if holding is not None and holding.ended_ms is None and write.row.owner != holding.member_id:
            holding.was_given = True
            holding.end(write.at_ms)
        elif holding is not None and write.row.stopped is not None:
            holding.end(write.at_ms)

    def _change_owner(self, write: facts.LeaseWrite, process: str | None) -> None:
        if (holding := self._last_holding(write.shard_id)) is not None:
            holding.end(write.at_ms)
        if process is not None:
            assert write.row.owner is not None
            holding = _ShardHolding(process, write.row.owner, write.row.fence_token)
            self._holdings.setdefault(write.shard_id, []).append(holding)

    def _last_holding(self, shard_id: str) -> _ShardHolding | None:
        holdings = self._holdings.get(shard_id)
        return holdings[-1] if holdings else None

    def _all_holdings(self) -> Iterator[_ShardHolding]:
        return (holding for holdings in self._holdings.values() for holding in holdings)

    def _holding_of(self, call: facts.RecordCall) -> _ShardHolding | None:
        """None if the process does not have the lease any more, by the store's rows."""
        last = self._last_holding(call.shard_id)
        return last if last is not None and (last.process, last.fence_token) == call.owner else None

    def _check_earlier_holdings(self, call: facts.RecordCall) -> None:
        for holding in self._holdings.get(call.shard_id, ()):
            finished_ms = holding.finished_ms.get(call.position)
            if finished_ms is None or holding is self._holding_of(call):
                continue
            until_ms = call.at_ms if holding.ended_ms is None else holding.ended_ms
            if holding.was_given and finished_ms <= until_ms:
                self.complain(
                    call.at_ms,
                    f"{call} is handled again although {holding.process} finished it before it gave the shard away",
                )
                return
            free_ms = self._longest_free(holding.process, finished_ms, until_ms)
            if free_ms > self._commit_ms:
                self.complain(
                    call.at_ms,
                    f"{call} is handled again although {holding.process} finished it at {finished_ms / 1000:.3f} s "
                    f"and could have committed it for {free_ms} ms after that",
                )
                return

    def _longest_free(self, process: str, from_ms: int, until_ms: int) -> int:
        """The longest uninterrupted time in which the process could commit."""
        longest_ms, free_since_ms = 0, from_ms
        for blocked_ms, unblocked_ms in sorted(self._blocked.get(process, ())):
            if blocked_ms >= until_ms:
                break
            longest_ms = max(longest_ms, blocked_ms - free_since_ms)
            free_since_ms = max(free_since_ms, unblocked_ms)
        return max(longest_ms, until_ms - free_since_ms)


# P4, one owner


class OneOwner(facts.Checker):
    """P4: a worker whose lease has lapsed starts nothing more. Fence tokens identify owners and only grow.

    A holding is one process's work on a shard with one fence token. Once another holding has started a record of the
    shard, an earlier one starts nothing, whatever the tokens are and whatever the store has lost.
    """

    promise = "one owner"

    def __init__(self) -> None:
        super().__init__()
        self._holdings: dict[str, list[tuple[str, int]]] = {}
        """Process and fence token, by shard, in the order of their first starts."""
        self._tokens_grow = True
        self._highest: dict[str, facts.RecordCall] = {}
        """The call with the highest token of each key, over all shards of its lineage."""

    def tell(self, fact: facts.Fact) -> None:
        match fact:
            case facts.CallStarted(call):
                self._start(call)
            case facts.StoreWentBack():
                self._tokens_grow = False  # the store may issue the tokens that it lost again
            case facts.OwnerChanged(write, process) if process is not None and not self._tokens_grow:
                holdings = self._holdings.get(write.shard_id, [])
                if (again := (process, write.row.fence_token)) in holdings:
                    holdings.remove(again)  # a new holding, with the token of one that the store has lost

    def _start(self, call: facts.RecordCall) -> None:
        holdings = self._holdings.setdefault(call.shard_id, [])
        if call.owner in holdings[:-1]:
            self.complain(call.at_ms, f"stale dispatch: {call} starts after {holdings[-1]} did")
            return
        if call.owner not in holdings:
            holdings.append(call.owner)
        if not self._tokens_grow:
            return
        before = self._highest.get(call.partition_key)
        if before is not None and call.fence_token < before.fence_token:
            self.complain(call.at_ms, f"the fence token goes back: {call} starts after {before}")
        elif before is not None and call.fence_token == before.fence_token and call.process != before.process:
            self.complain(call.at_ms, f"two owners with one fence token: {call} starts after {before}")
        self._highest[call.partition_key] = call


RECOVERY_MS = 6_000
"""The time that a process gets after a pause: the longest grace of the simulated workers, plus one second."""


class _RunningCalls(facts.Checker):
    """Knows which calls are running. Two kinds of calls are excused: those that their process reported as zombies
    (they ignore their cancellation, and have their fence token), and those of a process that is paused or has only
    just resumed (it could neither cancel nor report anything).
    """

    def __init__(self) -> None:
        super().__init__()
        self.running: dict[str, list[facts.RecordCall]] = {}
        """By shard."""
        self._halted_until: dict[str, int] = {}
        self._orphans: dict[str, None] = {}

    def tell(self, fact: facts.Fact) -> None:
        match fact:
            case facts.CallStarted(call):
                self.running.setdefault(call.shard_id, []).append(call)
            case facts.CallFinished(call) | facts.CallAbandoned(call):
                self._remove(call)
            case facts.ZombieReported(process, shard_id, position):
                calls = self.running.get(shard_id, [])
                for call in [call for call in calls if (call.process, call.position) == (process, position)]:
                    calls[:] = [other for other in calls if other is not call and not _is_same_batch(other, call)]
            case facts.ProcessHalted(process, until_ms):
                self._halted_until[process] = max(until_ms, self._halted_until.get(process, 0))
            case facts.ProcessDied(_, process):
                for calls in self.running.values():
                    calls[:] = [call for call in calls if call.process != process]
            case facts.StoreEmptied(processes):
                self._orphans |= dict.fromkeys(processes)

    def complain_unless_excused(self, at_ms: int, running: facts.RecordCall, what: str) -> None:
        halted_until_ms = self._halted_until.get(running.process)
        could_act = halted_until_ms is None or at_ms > halted_until_ms + RECOVERY_MS
        if could_act and running.process not in self._orphans:
            self.complain(at_ms, f"{what} while {running} is running since {running.at_ms / 1000:.3f} s")

    def _remove(self, call: facts.RecordCall) -> None:
        calls = self.running.get(call.shard_id, [])
        for index, running in enumerate(calls):
            if (running.position, running.owner) == (call.position, call.owner):
                del calls[index]
                return


class NoOverlap(_RunningCalls):
    """P4: two owners never run the same record at the same time."""

    promise = "no overlap"

    def tell(self, fact: facts.Fact) -> None:
        if isinstance(fact, facts.CallStarted):
            call = fact.call
            for other in self.running.get(call.shard_id, ()):
                if other.position == call.position and other.owner != call.owner:
                    self.complain_unless_excused(call.at_ms, other, f"{call} starts")
        super().tell(fact)


class QuietTransfers(_RunningCalls):
    """P4: no call is running on a shard when its lease is given away, released or taken."""

    promise = "quiet transfers"

    def __init__(self) -> None:
        super().__init__()
        self._members: dict[tuple[str, int], str] = {}
        """The owner by shard and fence token."""

    def tell(self, fact: facts.Fact) -> None:
        match fact:
            case facts.OwnerChanged(write, process):
                self._change_owner(write, process)
            case facts.MemberLeft(at_ms, member_id):
                for calls in self.running.values():
                    for call in calls:
                        if self._members.get((call.shard_id, call.fence_token)) == member_id:
                            self.complain_unless_excused(at_ms, call, f"{member_id} gives up its leases")
            case facts.StoreWentBack():
                self._members.clear()  # the store may issue their tokens again, to others
        super().tell(fact)

    def _change_owner(self, write: facts.LeaseWrite, process: str | None) -> None:
        row, shard_id = write.row, write.shard_id
        for call in self.running.get(shard_id, ()):
            if call.owner != (process, row.fence_token):
                what = f"{shard_id} passes to {process} with token {row.fence_token}"
                self.complain_unless_excused(write.at_ms, call, what)
        if row.owner is not None:
            self._members[(shard_id, row.fence_token)] = row.owner


def _is_same_batch(one: facts.RecordCall, other: facts.RecordCall) -> bool:
    return bool(one.batch) and (one.process, one.batch) == (other.process, other.batch)


# P5, bounded


class WithinBudget(facts.Checker):
    """P5: a consumer stays within its byte budget, which counts what is received from the first byte of a body on. It
    holds nothing of it after a clean stop.
    """

    promise = "within budget"

    def tell(self, fact: facts.Fact) -> None:
        match fact:
            case facts.BytesMeasured(at_ms, process, used, peak, limit) if used < 0 or max(used, peak) > limit:
                self.complain(at_ms, f"{process} holds {used} bytes and held {peak}, of {limit}")
            case facts.BytesReceived(at_ms, process, received_bytes, counted_bytes) if received_bytes > counted_bytes:
                what = f"{process} receives {received_bytes} bytes, and its budget counts {counted_bytes}"
                self.complain(at_ms, what)
            case facts.CleanStop(at_ms, process, used_bytes) if used_bytes:
                self.complain(at_ms, f"{process} stopped, and {used_bytes} bytes are not given back")


# P7, no silent failures


class NoStandstill(_UnfinishedRecords):
    """P7: once the faults are over, everything that was written is handled within a bounded time."""

    promise = "no standstill"

    @property
    def unfinished_count(self) -> int:
        return sum(map(len, self.unfinished.values()))

    def tell(self, fact: facts.Fact) -> None:
        super().tell(fact)
        match fact:
            case facts.RecordDeleted(record):
                self.unfinished[record.shard_id].pop(record.position, None)
            case facts.RunEnded(at_ms) if count := self.unfinished_count:
                first = next(record for records in self.unfinished.values() for record in records.values())
                self.complain(
                    at_ms,
                    f"{count} records were never finished, the first is {first.partition_key!r} at "
                    f"{first.shard_id}/{first.position}",
                )


class NoFalseSuccess(facts.Checker):
    """P7: a run that ends by itself does not report success while a shard that it owns is stopped (rule D12)."""

    promise = "no false success"

    def __init__(self) -> None:
        super().__init__()
        self._owners: dict[str, str | None] = {}
        self._stopped: dict[str, Stopped] = {}

    def tell(self, fact: facts.Fact) -> None:
        match fact:
            case facts.OwnerChanged(write, process):
                self._owners[write.shard_id] = process
            case facts.LeaseCommitted(write):
                if write.row.stopped is None:
                    self._stopped.pop(write.shard_id, None)
                else:
                    self._stopped[write.shard_id] = write.row.stopped
            case facts.LeaseDeleted(shard_id):
                self._stopped.pop(shard_id, None)
            case facts.StoreWentBack():
                self._owners.clear()
                self._stopped.clear()
            case facts.SuccessReported(at_ms, process):
                self._check_success(at_ms, process)

    def _check_success(self, at_ms: int, process: str) -> None:
        for shard_id, stopped in self._stopped.items():
            if self._owners.get(shard_id) == process:
                what = f"{process} ended by itself and reported success, but {shard_id} is {stopped.reason}"
                self.complain(at_ms, what)


class NoSilentFailures(facts.Checker):
    """P7: no background task ends in an error that nobody sees, and no worker ends in an error without a cause."""

    promise = "no silent failures"

    def tell(self, fact: facts.Fact) -> None:
        match fact:
            case facts.UnseenError(at_ms, what):
                self.complain(at_ms, what)
