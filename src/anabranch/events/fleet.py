"""What happens to the members of a fleet, and to the store that they share."""

import logging

from anabranch.events.event import Event

__all__ = [
    "MemberDiffers",
    "MemberEnded",
    "MemberSealed",
    "StoreReset",
    "StoreRolledBack",
    "StoreUnanswered",
]


class MemberSealed(Event, frozen=True, kw_only=True):
    """This member has ended another that showed no life."""

    level = logging.WARNING
    member_id: str

    def sentence(self) -> str:
        return f"member {self.member_id} showed no life and was sealed"


class MemberDiffers(Event, frozen=True, kw_only=True):
    """A member with other settings than this one's has joined the application and works beside it. It should have been
    refused, and should end by itself.
    """

    level = logging.ERROR
    member_id: str
    fingerprint: str

    def sentence(self) -> str:
        return f"member {self.member_id} works beside this one with other settings ({self.fingerprint}): stop it"


class MemberEnded(Event, frozen=True, kw_only=True):
    """This member is over by the store's word; the process goes on as a new one."""

    level = logging.WARNING
    member_id: str
    reason: str

    def sentence(self) -> str:
        return f"member {self.member_id} ended ({self.reason}): nothing that it held is worked on any more"


class StoreRolledBack(Event, frozen=True, kw_only=True):
    """The lease store has forgotten writes that it had acknowledged."""

    level = logging.ERROR

    def sentence(self) -> str:
        return "the lease store went back in time: all leases are dropped and taken anew after the longest expiry"


class StoreReset(Event, frozen=True, kw_only=True):
    """The application's row in the lease store is gone or another one."""

    level = logging.CRITICAL

    def sentence(self) -> str:
        return "the lease store no longer holds this application: stopping instead of starting from nothing"


class StoreUnanswered(Event, frozen=True, kw_only=True):
    """A call to the lease store without which the consumer cannot go on got no answer, and is made again."""

    level = logging.WARNING
    error: str
    failure_count: int
    """In a row."""

    def sentence(self) -> str:
        return f"the lease store gave no answer {self.failure_count} times in a row, and is asked again: {self.error}"
