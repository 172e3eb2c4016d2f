"""The conditional writes of a lease store, as functions over rows. Every store uses these conditions.

A function gets the stored row (None if there is none) and returns the row after the write. If the condition fails, it
returns the stored row itself, or a `Conflict` with it. A store writes a row only if it `is not` the row it passed in. A
caller whose answer was lost learns from the next answer what is stored.

No condition reads a second row, so a store needs no transaction. INV-1 (while a member is live, only that member writes
the leases that name it) rests on two things: the owner and version compared here, and the taker's plan, which has seen
the owner sealed or left. Both states are final.
"""

from msgspec.structs import replace

from anabranch._model.leases import (
    REQUESTS_MAX,
    AppRow,
    Conflict,
    ControlRow,
    HeartbeatWrite,
    LeaseRow,
    MemberRow,
    Place,
    StatusRow,
    StreamRow,
)


def heartbeat(row: MemberRow | None, write: HeartbeatWrite) -> MemberRow | None:
    """Raises a live member's counter to the attempt (rule L2). A late attempt changes nothing."""
    if row is None or row.state != "live" or write.attempt <= row.counter:
        return row
    answered = write.answered
    return replace(
        row,
        counter=write.attempt,
        load=write.load,
        change_count=write.change_count,
        changed=write.changed,
        reads_healthy=write.reads_healthy,
        draining=write.draining,
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


def request_hand_off(row: MemberRow | None, request: str) -> MemberRow | None:
    """Adds the short name of a request to a live donor's row, once and if there is room (rule L12)."""
    if row is None or row.state != "live" or request in row.wanted or len(row.wanted) >= REQUESTS_MAX:
        return row
    return replace(row, wanted=(*row.wanted, request))


def may_delete_member(row: MemberRow | None) -> bool:
    """The caller has seen that no lease names it: otherwise others would watch the missing owner for its expiry."""
    return row is not None and row.state != "live"


def take_lease(
    row: LeaseRow | None,
    member_id: str,
    *,
    expected_owner: str | None,
    expected_version: int,
    epoch_floor: int = 0,
) -> LeaseRow | Conflict:
    """Rule L7. The caller has seen that the expected owner was sealed or left, or was missing for its whole expiry."""
    if row is None or row.is_finished or row.owner != expected_owner or row.version != expected_version:
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
    """A write by the owner: commit, finish, stop, release or give."""
    if stored is None or stored.owner != member_id or stored.version != expected_version:
        return Conflict(stored)
    return replace(row, version=expected_version + 1, extra=stored.extra)


def may_delete_lease(row: LeaseRow | None, expected_version: int) -> bool:
    return row is not None and row.is_finished and row.version == expected_version


def write_status(stored: StatusRow | None, row: StatusRow) -> StatusRow:
    """A write that arrives late changes nothing."""
    if stored is None:
        return row
    return replace(row, extra=stored.extra) if row.revision > stored.revision else stored


def write_stream(stored: StreamRow | None, row: StreamRow, expected_version: int) -> StreamRow | None:
    """None if the version does not match."""
    if stored is None or stored.version != expected_version:
        return None
    return replace(row, version=expected_version + 1, extra=stored.extra)


def write_control(stored: ControlRow | None, row: ControlRow) -> ControlRow | None:
    """None if the command is no longer pending: its result is final."""
    if stored is None or stored.state != "pending":
        return None
    return replace(row, extra=stored.extra)


def may_delete_app(row: AppRow | None, app_id: str) -> bool:
    return row is not None and row.app_id == app_id


def record_incarnation(row: AppRow | None, app_id: str, expected: str, incarnation: str) -> AppRow | None:
    """Sets the trusted storage (rule L13), if it is still the one that the caller saw."""
    if row is None or row.app_id != app_id or row.incarnation != expected:
        return row
    return replace(row, incarnation=incarnation)


def move_app(row: AppRow | None, app_id: str, expected: Place, place: Place, other_store: str) -> AppRow | None:
    """Sets where the application lives, if its place is still the expected one."""
    if row is None or row.app_id != app_id or row.place != expected:
        return row
    return replace(row, place=place, other_store=other_store)


def renew_watch(row: AppRow | None, app_id: str) -> AppRow | None:
    """Tells the members that a viewer is watching the fleet."""
    if row is None or row.app_id != app_id:
        return row
    return replace(row, watch=row.watch + 1)
