"""A linearizable lease store in memory, with what real ones do on bad days: reads that lag, going back in time, loss.

Its conditions are `_core.leases.rows`, as in every store of ours. Calls are plain functions that take effect at once;
whether and when they arrive is the network's business.
"""

from bisect import bisect_right
from collections.abc import Sequence

from anabranch._core.leases import rows
from anabranch._model.leases import AppRow, Conflict, HandOffRequest, HeartbeatWrite, LeaseKey, LeaseRow, MemberRow

__all__ = ["TickStore"]

_Snapshot = tuple[AppRow | None, dict[str, MemberRow], dict[LeaseKey, LeaseRow]]


class TickStore:
    def __init__(self, *, keeps_history: bool = False) -> None:
        self.now_ms = 0
        self.incarnation = "storage-0"
        self.app: AppRow | None = None
        self.members: dict[str, MemberRow] = {}
        self.leases: dict[LeaseKey, LeaseRow] = {}
        self.is_away = False
        self.takes = 0
        self.seals = 0
        self.gifts = 0
        """Leases that their owner gave to somebody."""
        self._keeps_history = keeps_history
        self._history: list[_Snapshot] = []
        self._ended_ms: list[int] = []
        """Until when each of the history was the present."""

    # reads

    def read_app(self) -> tuple[AppRow | None, str]:
        return self.app, self.incarnation

    def read_members(self, lag_ms: int = 0) -> Sequence[MemberRow]:
        _, members, _ = self._as_of(self.now_ms - lag_ms)
        return tuple(members.values())

    def read_leases(self, lag_ms: int = 0) -> Sequence[LeaseRow]:
        _, _, leases = self._as_of(self.now_ms - lag_ms)
        return tuple(row for row in leases.values() if not row.is_finished)

    # writes

    def open(self, app: AppRow, leases: Sequence[LeaseRow]) -> AppRow:
        if self.app is None:
            self._note()
            self.app = app
            self.leases = {row.key: row for row in leases}
        return self.app

    def record_incarnation(self, expected: str, incarnation: str) -> AppRow | None:
        self._note()
        self.app = rows.record_incarnation(self.app, self.app.app_id if self.app else "", expected, incarnation)
        return self.app

    def register_member(self, row: MemberRow) -> MemberRow:
        self._note()
        return self.members.setdefault(row.member_id, row)

    def heartbeat(self, write: HeartbeatWrite) -> MemberRow | None:
        return self._put_member(write.member_id, rows.heartbeat(self.members.get(write.member_id), write))

    def seal_member(self, member_id: str, observed_counter: int) -> MemberRow | None:
        row = self.members.get(member_id)
        sealed = self._put_member(member_id, rows.seal_member(row, observed_counter))
        self.seals += sealed is not row
        return sealed

    def leave(self, member_id: str) -> MemberRow | None:
        return self._put_member(member_id, rows.leave(self.members.get(member_id)))

    def request_hand_off(self, donor: str, request: HandOffRequest) -> MemberRow | None:
        return self._put_member(donor, rows.request_hand_off(self.members.get(donor), request))

    def delete_member(self, member_id: str) -> bool:
        if not rows.may_delete_member(self.members.get(member_id)):
            return False
        self.remove_member(member_id)
        return True

    def take_lease(
        self, key: LeaseKey, member_id: str, expected_owner: str | None, expected_version: int, epoch_floor: int
    ) -> LeaseRow | Conflict:
        answer = rows.take_lease(
            self.leases.get(key),
            member_id,
            expected_owner=expected_owner,
            expected_version=expected_version,
            epoch_floor=epoch_floor,
        )
        if not isinstance(answer, Conflict):
            self._note()
            self.leases[key] = answer
            self.takes += 1
        return answer

    def write_lease(self, row: LeaseRow, member_id: str, expected_version: int) -> LeaseRow | Conflict:
        stored = self.leases.get(row.key)
        answer = rows.write_lease(stored, row, member_id=member_id, expected_version=expected_version)
        if not isinstance(answer, Conflict):
            self._note()
            self.leases[row.key] = answer
            self.gifts += answer.owner is not None and answer.owner != member_id
        return answer

    # bad days

    def remove_member(self, member_id: str) -> None:
        self._note()
        self.members.pop(member_id, None)

    def roll_back(self, by_ms: int) -> None:
        """Forgets what was written in the last `by_ms`, as a replica that took over, and is another storage now."""
        app, members, leases = self._as_of(self.now_ms - by_ms)
        self.app, self.members, self.leases = app, dict(members), dict(leases)
        self._become_another()

    def reset(self) -> None:
        self.app, self.members, self.leases = None, {}, {}
        self._become_another()

    def _become_another(self) -> None:
        self._history.clear()
        self._ended_ms.clear()
        name, _, number = self.incarnation.partition("-")
        self.incarnation = f"{name}-{int(number) + 1}"

    def _put_member(self, member_id: str, row: MemberRow | None) -> MemberRow | None:
        if row is not None and row is not self.members.get(member_id):
            self._note()
            self.members[member_id] = row
        return row

    def _note(self) -> None:
        """Keeps the rows as they are until now, where reads may lag or the store may go back."""
        if self._keeps_history:
            self._history.append((self.app, dict(self.members), dict(self.leases)))
            self._ended_ms.append(self.now_ms)

    def _as_of(self, time_ms: int) -> _Snapshot:
        index = bisect_right(self._ended_ms, time_ms)
        return (self.app, self.members, self.leases) if index == len(self._history) else self._history[index]
