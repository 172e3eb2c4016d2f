"""The conditional writes of a lease store, as functions over rows: what each condition means, once for all stores.

A function gets the row as it is stored (None: there is none) and returns the row as it stands after the write. Where
the condition does not hold it returns the stored row itself, or a `Conflict` that holds it: a store writes only what
`is not` the row it passed in. So a caller whose earlier answer was lost learns from the next one what is there.

INV-1 lives here: while a member is live, only that member writes the leases that name it. `sealed` and `left` are
final, so a store may check the owner's row before the lease's and need not join both writes.
"""

from collections.abc import Iterable

from msgspec.structs import replace

from anabranch._model.leases import (
    AppRow,
    Beat,
    Conflict,
    ControlRow,
    HandOffRequest,
    LeaseRow,
    MemberRow,
    StreamRow,
)

__all__ = [
    "heartbeat",
    "leave",
    "may_begin",
    "may_delete_app",
    "may_delete_lease",
    "may_delete_member",
    "record_incarnation",
    "request_hand_off",
    "seal_member",
    "take_lease",
    "write_control",
    "write_lease",
    "write_stream",
]


def heartbeat(row: MemberRow | None, beat: Beat) -> MemberRow | None:
    """Raises a live member's counter to the attempt (rule L2). An attempt that comes late changes nothing."""
    if row is None or row.state != "live" or beat.attempt <= row.counter:
        return row
    answered = beat.answered
    return replace(
        row,
        counter=beat.attempt,
        load=beat.load,
        lease_version=beat.lease_version,
        reads_healthy=beat.reads_healthy,
        draining=beat.draining,
        status=beat.status,
        wanted=tuple(request for request in row.wanted if request not in answered) if answered else row.wanted,
    )


def seal_member(row: MemberRow | None, observed_counter: int) -> MemberRow | None:
    """Live -> sealed while the counter is the observed one (rule L3)."""
    if row is None or row.state != "live" or row.counter != observed_counter:
        return row
    return replace(row, state="sealed")


def leave(row: MemberRow | None) -> MemberRow | None:
    if row is None or row.state != "live":
        return row
    return replace(row, state="left")


def request_hand_off(row: MemberRow | None, request: HandOffRequest) -> MemberRow | None:
    """Adds a request to a live donor's row, once (rule L12)."""
    if row is None or row.state != "live" or request in row.wanted:
        return row
    return replace(row, wanted=(*row.wanted, request))


def may_delete_member(row: MemberRow | None, *, is_named_by_a_lease: bool) -> bool:
    return row is not None and row.state != "live" and not is_named_by_a_lease


def take_lease(
    row: LeaseRow | None,
    owner: MemberRow | None,
    member_id: str,
    *,
    expected_owner: str | None,
    expected_version: int,
    epoch_floor: int = 0,
) -> LeaseRow | Conflict:
    """Rule L7; `owner` is the member row of the lease's stored owner. An owner without a row counts as dead here: how
    long it must have been missing is the taker's to judge (rule L5).
    """
    if row is None or row.is_finished or row.owner != expected_owner or row.version != expected_version:
        return Conflict(row)
    if row.owner is not None and owner is not None and owner.state == "live":
        return Conflict(row)
    return replace(
        row,
        owner=member_id,
        version=row.version + 1,
        epoch=max(row.epoch, epoch_floor) + 1,
        takes_without_progress=row.takes_without_progress + 1,
    )


def write_lease(
    stored: LeaseRow | None, row: LeaseRow, *, member_id: str, expected_version: int
) -> LeaseRow | Conflict:
    """The owner's own write: commit, finish, stop, release and give are all this one."""
    if stored is None or stored.owner != member_id or stored.version != expected_version:
        return Conflict(stored)
    return replace(row, version=expected_version + 1)


def may_delete_lease(row: LeaseRow | None, expected_version: int) -> bool:
    return row is not None and row.is_finished and row.version == expected_version


def write_stream(stored: StreamRow | None, row: StreamRow, expected_version: int) -> StreamRow | None:
    """None where the version has moved on."""
    if stored is None or stored.version != expected_version:
        return None
    return replace(row, version=expected_version + 1)


def write_control(stored: ControlRow | None, row: ControlRow) -> ControlRow | None:
    """None where the command is pending no more: what became of it is final."""
    if stored is None or stored.state != "pending":
        return None
    return row


def may_begin(app: AppRow | None, app_id: str) -> bool:
    """Whether a stream or a lease may be made, or a stream be marked as begun: in the application that the caller has
    opened, and in no other one of its name (rule L14). To be asked in one step with the write.
    """
    return app is not None and app.app_id == app_id


def may_delete_app(row: AppRow | None, members: Iterable[MemberRow], app_id: str) -> bool:
    """A member that registers meanwhile finds its application gone, and says so (rule L14)."""
    return row is not None and row.app_id == app_id and all(member.state != "live" for member in members)


def record_incarnation(row: AppRow | None, expected: str, incarnation: str) -> AppRow | None:
    """The storage that this application trusts (rule L13), changed only from the one that the caller saw."""
    if row is None or row.incarnation != expected:
        return row
    return replace(row, incarnation=incarnation)
