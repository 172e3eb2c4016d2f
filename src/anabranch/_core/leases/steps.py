"""What a round of the lease protocol asks to be done, as values.

The plan makes them, the shell performs them (each is one store call, but `Drain`), and `outcome` applies what came of
it.
"""

import msgspec

from anabranch._model.leases import HandOffRequest, LeaseKey, LeaseRow

__all__ = ["DeleteMember", "Drain", "RequestHandOff", "Seal", "Step", "Take", "Write"]


class Seal(msgspec.Struct, frozen=True):
    """End a member that has shown no life for its own expiry (rule L3)."""

    member_id: str
    observed_counter: int


class Take(msgspec.Struct, frozen=True):
    """Take a lease that is free, or whose owner is over (rule L7)."""

    key: LeaseKey
    expected_owner: str | None
    expected_version: int
    epoch_floor: int = 0
    parents: tuple[LeaseKey, ...] = ()
    """For a shard's first start: read these first. All must be finished or gone, and the floor is raised to their
    highest epoch, so that the fence token only grows along a line of descent (rules S1, U3).
    """


class RequestHandOff(msgspec.Struct, frozen=True):
    """Ask a live member for a lease (rule L12)."""

    donor: str
    request: HandOffRequest


class Drain(msgspec.Struct, frozen=True):
    """Stop starting records of a held lease and finish what runs: it was asked for, and will be given away."""

    request: HandOffRequest


class Write(msgspec.Struct, frozen=True):
    """Write a held lease: a commit, a finish, a release or a give."""

    row: LeaseRow
    expected_version: int


class DeleteMember(msgspec.Struct, frozen=True):
    """Remove the row of a member that has long been over."""

    member_id: str


Step = Seal | Take | RequestHandOff | Drain | Write | DeleteMember
