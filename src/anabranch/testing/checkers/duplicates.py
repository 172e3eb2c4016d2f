"""P3: what was committed is not handled again, nor what finished so long ago that it should have been committed. After
a process has ended in order, or has given a shard away, nothing is that it had finished.

A record should be committed when its process has been able to commit for `commit_ms` on end since it finished. What
counts as unable are facts of the world, never what the engine says:

- the process did not run (it was paused, or its event loop stalled);
- the store was away, or the process was cut off from it;
- a message of one of its lease writes was lost or late: for as long as one store call may take, from the time that this
  one was sent;
- it had the lease no more: the process had ended, its member had asked to leave or was sealed, the row had another
  owner, or the store had gone back in time or was emptied;
- the shard had been written as stopped: that is the last write (rule D4);
- more records of the shard before this one were open than a lease row can name (rule M1).
"""

from collections.abc import Iterator

from anabranch._model.leases import Checkpoint
from anabranch._model.streams import Position
from anabranch.testing.checkers.coverage import covers
from anabranch.testing.checkers.journal import Call, Checker, Commit, Written

__all__ = ["Duplicates"]

OPEN_RECORDS_MAX = 1_000
"""That a lease row can name."""


class _Holding:
    """One process's time as the owner of a shard, by the store's rows."""

    def __init__(self, process: str, member_id: str, fence_token: int) -> None:
        self.process = process
        self.member_id = member_id
        self.fence_token = fence_token
        self.ended_ms: int | None = None
        self.was_given = False
        """It ended by its owner's own write, which carries all that was finished."""
        self.open: dict[Position, None] = {}
        """Records that were started and are not finished."""
        self.finished_ms: dict[Position, int] = {}
        """When the records finished that should be committed."""

    def finish(self, position: Position, at_ms: int) -> None:
        self.open.pop(position, None)
        if len(self.open) <= OPEN_RECORDS_MAX or sum(other < position for other in self.open) <= OPEN_RECORDS_MAX:
            self.finished_ms.setdefault(position, at_ms)

    def end(self, at_ms: int) -> None:
        if self.ended_ms is None:
            self.ended_ms = at_ms


class Duplicates(Checker):
    promise = "few duplicates"

    def __init__(self, commit_ms: int = 1_000) -> None:
        super().__init__()
        self.repeats = 0
        self._commit_ms = commit_ms
        """Within so long what is finished is committed by a process that can."""
        self._holdings: dict[str, list[_Holding]] = {}
        """Of each shard, the latest one last."""
        self._hindered: dict[str, list[tuple[int, int]]] = {}
        """When each process could not commit, in the order in which that began."""
        self._finished: dict[tuple[str, object], None] = {}
        self._committed: dict[str, Checkpoint] = {}
        self._inherited: dict[tuple[str, int], Checkpoint] = {}
        """What the holdings began with, by shard and fence token."""
        self._finished_by: dict[str, dict[str, dict[Position, None]]] = {}
        """What each process has finished of the shards that it did not lose, by process and shard."""
        self._tokens: dict[tuple[str, str], int] = {}
        """The token that each process last started something of a shard with."""
        self._lost: dict[tuple[str, str], int] = {}
        """The token that each process last lost a shard with: what it finishes with that is nobody's word any more."""
        self._settled: dict[tuple[str, Position], str] = {}
        """What was finished by a process that has ended in order, and its name."""

    def committed(self, commit: Commit) -> None:
        self._committed[commit.shard_id] = commit.row.checkpoint
        holding = self._last_holding(commit.shard_id)
        if holding is not None and holding.ended_ms is None and commit.row.owner != holding.member_id:
            holding.was_given = True
            holding.end(commit.at_ms)
        elif holding is not None and commit.row.stopped is not None:
            holding.end(commit.at_ms)

    def started(self, call: Call) -> None:
        holding = (call.shard_id, call.fence_token)
        self._tokens[(call.process, call.shard_id)] = call.fence_token
        if holding not in self._inherited:
            self._inherited[holding] = self._committed.get(call.shard_id, Checkpoint())
        if (call.shard_id, call.position) in self._finished:
            self.repeats += 1
        if covers(self._inherited[holding], Written(call.shard_id, call.position, call.partition_key)):
            self.complain(call.at_ms, f"{call} is handled again although it was committed")
        elif (who := self._settled.get((call.shard_id, call.position))) is not None:
            self.complain(call.at_ms, f"{call} is handled again although {who} had finished it and ended in order")
        else:
            self._check_bound(call)
        if (mine := self._holding_of(call)) is not None:
            mine.open[call.position] = None

    def finished(self, call: Call) -> None:
        self._finished[(call.shard_id, call.position)] = None
        if call.fence_token > self._lost.get((call.process, call.shard_id), -1):
            self._finished_by.setdefault(call.process, {}).setdefault(call.shard_id, {})[call.position] = None
        if (mine := self._holding_of(call)) is not None:
            mine.finish(call.position, call.at_ms)

    def lost(self, process: str, shard_id: str) -> None:
        self._lost[(process, shard_id)] = self._tokens.get((process, shard_id), -1)
        self._finished_by.get(process, {}).pop(shard_id, None)

    def stopped(self, at_ms: int, process: str, used_bytes: int) -> None:
        del at_ms, used_bytes
        for shard_id, positions in self._finished_by.get(process, {}).items():
            self._settled |= dict.fromkeys(((shard_id, position) for position in positions), process)

    def store_went_back(self) -> None:
        self._committed.clear()
        self._inherited.clear()
        self._finished_by.clear()
        self._settled.clear()
        self._holdings.clear()

    # the bound

    def owned(self, process: str | None, commit: Commit) -> None:
        if (holding := self._last_holding(commit.shard_id)) is not None:
            holding.end(commit.at_ms)
        if process is not None:
            assert commit.row.owner is not None
            holding = _Holding(process, commit.row.owner, commit.row.fence_token)
            self._holdings.setdefault(commit.shard_id, []).append(holding)

    def _last_holding(self, shard_id: str) -> _Holding | None:
        holdings = self._holdings.get(shard_id)
        return holdings[-1] if holdings else None

    def left(self, at_ms: int, member_id: str) -> None:
        for holding in self._all_holdings():
            if holding.member_id == member_id:
                holding.end(at_ms)

    def died(self, at_ms: int, process: str) -> None:
        for holding in self._all_holdings():
            if holding.process == process:
                holding.end(at_ms)

    def hindered(self, process: str, from_ms: int, until_ms: int) -> None:
        self._hindered.setdefault(process, []).append((from_ms, until_ms))

    def _all_holdings(self) -> Iterator[_Holding]:
        return (holding for holdings in self._holdings.values() for holding in holdings)

    def _holding_of(self, call: Call) -> _Holding | None:
        """None: the process has the lease no more, by the store's rows."""
        last = self._last_holding(call.shard_id)
        is_its = last is not None and last.process == call.process and last.fence_token == call.fence_token
        return last if is_its else None

    def _check_bound(self, call: Call) -> None:
        for holding in self._holdings.get(call.shard_id, ()):
            finished_ms = holding.finished_ms.get(call.position)
            if finished_ms is None or holding is self._holding_of(call):
                continue
            until_ms = call.at_ms if holding.ended_ms is None else holding.ended_ms
            well_ms = self._longest_well(holding.process, finished_ms, until_ms)
            if holding.was_given and finished_ms <= until_ms:
                self.complain(
                    call.at_ms,
                    f"{call} is handled again, although {holding.process} finished it before it gave the shard away",
                )
                return
            if well_ms > self._commit_ms:
                self.complain(
                    call.at_ms,
                    f"{call} is handled again, although {holding.process} had finished it at "
                    f"{finished_ms / 1000:.3f} s and could have committed it for {well_ms} ms on end after that",
                )
                return

    def _longest_well(self, process: str, from_ms: int, until_ms: int) -> int:
        """The longest time on end, between these two, in which the process could commit."""
        longest, well_since_ms = 0, from_ms
        for begin_ms, end_ms in sorted(self._hindered.get(process, ())):
            if begin_ms >= until_ms:
                break
            longest = max(longest, begin_ms - well_since_ms)
            well_since_ms = max(well_since_ms, end_ms)
        return max(longest, until_ms - well_since_ms)
