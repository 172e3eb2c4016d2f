"""The conditional writes of a lease store, as functions over rows. Every store uses these conditions.

A function gets the stored row (None if there is none) and returns the row after the write. If the condition fails, it
returns the stored row itself, or a `Conflict` with it. So a store writes only if the result `is not` the row that it
passed in. A caller that repeats a write, because the first response was lost, learns what is stored.

No condition reads a second row, so a store needs no transactions. INV-1 says that while a member is live, only that
member writes the leases that name it. Two checks ensure it: the functions here compare the owner and the version, and a
member takes a lease only after it has seen the owner sealed or left. Both states are final.
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
    """Sets a live member's counter to the number of the attempt, if that is higher (rule L2). So a heartbeat that
    arrives after a later one changes nothing.
    """
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
    """Evicts a member: sets its state from live to sealed, if its counter is still the observed one (rule L3)."""
    if row is None or row.state != "live" or row.counter != observed_counter:
        return row
    return replace(row, state="sealed")


def leave(row: MemberRow | None) -> MemberRow | None:
    """Sets the state from live to left, which frees all leases of the member."""
    if row is None or row.state != "live":
        return row
    return replace(row, state="left")


def request_hand_off(row: MemberRow | None, request: str) -> MemberRow | None:
    """Adds a request for a lease to the row of its owner, the donor (rule L12). Does nothing if the donor is not live,
    has this request already, or has `REQUESTS_MAX` requests.
    """
    if row is None or row.state != "live" or request in row.wanted or len(row.wanted) >= REQUESTS_MAX:
        return row
    return replace(row, wanted=(*row.wanted, request))


def may_delete_member(row: MemberRow | None) -> bool:
    """The caller has checked that it owns no lease. A lease whose owner's row is missing can only be taken after that
    row was missing for a whole expiry.
    """
    return row is not None and row.state != "live"


def take_lease(
    row: LeaseRow | None,
    member_id: str,
    *,
    expected_owner: str | None,
    expected_version: int,
    epoch_floor: int = 0,
) -> LeaseRow | Conflict:
    """Rule L7. The caller has seen the expected owner sealed or left, or its row missing for its whole expiry."""
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
    # `extra` has the fields of newer versions, here and below: a write by this version keeps them.
    return replace(row, version=expected_version + 1, extra=stored.extra)


def may_delete_lease(row: LeaseRow | None, expected_version: int) -> bool:
    return row is not None and row.is_finished and row.version == expected_version


def write_status(stored: StatusRow | None, row: StatusRow) -> StatusRow:
    """A status that arrives after a newer one changes nothing."""
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
    """Sets the storage that the fleet trusts (rule L13), if it is still the expected one."""
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
