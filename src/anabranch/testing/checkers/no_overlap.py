"""P4, while calls run: two owners never run one record at the same time (`NoOverlap`), and no call runs on a shard at
the moment when its lease is given away, released or taken by another (`QuietTransfers`).

A call that its process has reported as a zombie is excused: it ignored its cancellation, and has its fence token. So is
a call of a process that does not run, or that has only just gone on: it could neither cancel nor report anything.
"""

from collections.abc import Iterable

from anabranch._model.streams import Position
from anabranch.testing.checkers.journal import Call, Checker, Commit

__all__ = ["NoOverlap", "QuietTransfers"]

RECOVERY_MS = 6_000
"""What a process gets after it stood still: the longest grace of the simulated workers, and a second."""


class _RunningCalls(Checker):
    """Knows which calls run, and which of them should not be there any more."""

    def __init__(self) -> None:
        super().__init__()
        self.running: dict[str, list[Call]] = {}
        """By shard."""
        self._halted_until: dict[str, int] = {}
        self._orphans: dict[str, None] = {}

    def judge(self, at_ms: int, running: Call, what: str) -> None:
        halted_until_ms = self._halted_until.get(running.process)
        could_act = halted_until_ms is None or at_ms > halted_until_ms + RECOVERY_MS
        if could_act and running.process not in self._orphans:
            self.complain(at_ms, f"{what} while {running} runs since {running.at_ms / 1000:.3f} s")

    def started(self, call: Call) -> None:
        self.running.setdefault(call.shard_id, []).append(call)

    def finished(self, call: Call) -> None:
        calls = self.running.get(call.shard_id, [])
        for index, running in enumerate(calls):
            if running.position == call.position and is_of(running, call.process, call.fence_token):
                del calls[index]
                return

    def abandoned(self, call: Call) -> None:
        self.finished(call)

    def zombie(self, process: str, shard_id: str, position: Position) -> None:
        calls = self.running.get(shard_id, [])
        for call in [call for call in calls if (call.process, call.position) == (process, position)]:
            calls[:] = [other for other in calls if other is not call and not _are_one_batch(other, call)]

    def halted(self, process: str, until_ms: int) -> None:
        self._halted_until[process] = max(until_ms, self._halted_until.get(process, 0))

    def died(self, at_ms: int, process: str) -> None:
        del at_ms
        for calls in self.running.values():
            calls[:] = [call for call in calls if call.process != process]

    def store_emptied(self, processes: Iterable[str]) -> None:
        self._orphans |= dict.fromkeys(processes)


class NoOverlap(_RunningCalls):
    promise = "no overlap"

    def started(self, call: Call) -> None:
        for other in self.running.get(call.shard_id, ()):
            if other.position == call.position and not is_of(other, call.process, call.fence_token):
                self.judge(call.at_ms, other, f"{call} starts")
        super().started(call)


class QuietTransfers(_RunningCalls):
    promise = "quiet transfers"

    def __init__(self) -> None:
        super().__init__()
        self._members: dict[tuple[str, int], str] = {}
        """Who owned a shard with a fence token."""

    def owned(self, process: str | None, commit: Commit) -> None:
        row = commit.row
        for call in self.running.get(commit.shard_id, ()):
            if not is_of(call, process, row.fence_token):
                self.judge(commit.at_ms, call, f"{commit.shard_id} passes to {process} with token {row.fence_token}")
        if row.owner is not None:
            self._members[(commit.shard_id, row.fence_token)] = row.owner

    def left(self, at_ms: int, member_id: str) -> None:
        for calls in self.running.values():
            for call in calls:
                if self._members.get((call.shard_id, call.fence_token)) == member_id:
                    self.judge(at_ms, call, f"{member_id} gives up its leases")

    def store_went_back(self) -> None:
        """Its tokens may be handed out again, to others."""
        self._members.clear()


def is_of(call: Call, process: str | None, fence_token: int) -> bool:
    """Whether the call is of this holding."""
    return (call.process, call.fence_token) == (process, fence_token)


def _are_one_batch(one: Call, other: Call) -> bool:
    return bool(one.batch) and (one.process, one.batch) == (other.process, other.batch)
