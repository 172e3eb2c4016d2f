"""What happens to a consumer and its shards."""

import datetime as dt
import logging

from anabranch.events.event import Event

__all__ = [
    "CheckpointFailed",
    "ConsumerFailed",
    "ConsumerStarted",
    "ConsumerStopped",
    "DataLost",
    "HandOffForced",
    "HandOffKept",
    "HandlerFailed",
    "KeysUnordered",
    "LeaseGiven",
    "LeaseLost",
    "LeaseReleased",
    "LeaseTaken",
    "ListingFailed",
    "LoopBlocked",
    "LoopStalled",
    "Misrouted",
    "OrderChanged",
    "ReadFailed",
    "ShardFinished",
    "ShardStarted",
    "ShardStopped",
    "ShardSuspected",
    "StandstillBegan",
    "StreamChanged",
    "TaskRestarted",
    "ZombieCall",
]


class ConsumerStarted(Event, frozen=True, kw_only=True):
    """A consumer has joined its application."""

    app: str
    member_id: str
    store: str

    def sentence(self) -> str:
        return f"application {self.app!r} started as member {self.member_id}, leases in {self.store}"


class ConsumerFailed(Event, frozen=True, kw_only=True):
    """A consumer has failed while its caller was already leaving with another error, which carries this one."""

    level = logging.ERROR
    error: str
    leaving: str
    """The type of the other error."""

    def sentence(self) -> str:
        return f"the consumer failed while {self.leaving} was being raised: {self.error}"


class ConsumerStopped(Event, frozen=True, kw_only=True):
    """A consumer has left its application."""

    leftover_count: int

    def sentence(self) -> str:
        left = f", {self.leftover_count} records were left unfinished" if self.leftover_count else ""
        return f"stopped{left}"


class LeaseTaken(Event, frozen=True, kw_only=True):
    """This member owns the shard from now on."""

    fence_token: int

    def sentence(self) -> str:
        return f"lease taken (fence token {self.fence_token})"


class LeaseLost(Event, frozen=True, kw_only=True):
    """Another member owns the shard, or this one may not be sure any more."""

    level = logging.WARNING
    reason: str

    def sentence(self) -> str:
        return f"lease lost: {self.reason}"


class LeaseReleased(Event, frozen=True, kw_only=True):
    """This member has given the shard up."""

    def sentence(self) -> str:
        return "lease released"


class LeaseGiven(Event, frozen=True, kw_only=True):
    """This member has handed the shard to another."""

    to_member: str

    def sentence(self) -> str:
        return f"lease given to {self.to_member}"


class HandOffKept(Event, frozen=True, kw_only=True):
    """A hand-off was asked for, and the shard could not be drained in time: it stays."""

    level = logging.WARNING
    running_count: int

    def sentence(self) -> str:
        return f"kept although it was asked for: {self.running_count} handler calls did not end in time"


class HandOffForced(Event, frozen=True, kw_only=True):
    """A hand-off was asked for, and handler calls outlasted its deadline: they are told to end (`hand_off="force"`).
    The shard is given away when none of them runs any more; their records are handled again by its new owner.
    """

    level = logging.WARNING
    running_count: int
    to_member: str

    def sentence(self) -> str:
        return (
            f"{self.running_count} handler calls did not end in time and are told to: the shard goes to "
            f"{self.to_member} when the last has ended"
        )


class ShardStarted(Event, frozen=True, kw_only=True):
    """Reading has begun."""

    position: str

    def sentence(self) -> str:
        return f"reading from {self.position}"


class ShardFinished(Event, frozen=True, kw_only=True):
    """The shard's last record is finished."""

    children: tuple[str, ...]
    reason: str = "end"

    def sentence(self) -> str:
        next_ones = ", ".join(self.children) or "none"
        return f"finished ({self.reason}); children: {next_ones}"


class ShardStopped(Event, frozen=True, kw_only=True):
    """The shard stands still on purpose; its lease is kept and the record is named."""

    level = logging.ERROR
    reason: str
    position: str | None
    partition_key: str | None
    exception: BaseException | None = None
    """What the handler or the decoder raised, where that is why."""

    def sentence(self) -> str:
        at = f" at record {self.position} (partition key {self.partition_key!r})" if self.position else ""
        return f"stopped{at}: {self.reason}; its lease is kept, and a worker that starts later tries again"


class ShardSuspected(Event, frozen=True, kw_only=True):
    """Several owners in a row have ended without finishing anything of the shard: a record of it may have ended them.
    Its records are handled one by one, with nothing else beside them in this worker.
    """

    level = logging.WARNING
    owner_count: int

    def sentence(self) -> str:
        return f"{self.owner_count} owners in a row ended without any progress here: its records are handled alone"


class StandstillBegan(Event, frozen=True, kw_only=True):
    """The shard does not move, for a named reason."""

    level = logging.WARNING
    reason: str

    def sentence(self) -> str:
        return f"stands still: {self.reason}"


class OrderChanged(Event, frozen=True, kw_only=True):
    """The shard was handled in another order before: `order=` was changed, or the way in which records are taken."""

    before: str
    now: str
    repeats: bool
    """What was finished above the checkpoint is handled again: without an order it says nothing about keys."""

    @property
    def level(self) -> int:  # type: ignore[override]
        return logging.WARNING if self.repeats else logging.INFO

    def sentence(self) -> str:
        then = "what was finished above the checkpoint is handled again" if self.repeats else "nothing is repeated"
        return f"handled by order {self.now!r} from here on, and by {self.before!r} before: {then}"


class HandlerFailed(Event, frozen=True, kw_only=True):
    """One attempt to handle a record failed."""

    level = logging.WARNING
    position: str
    partition_key: str
    attempt: int
    error: str
    retry_in_ms: int | None
    """None after the last attempt; then the shard stops. A payload that does not decode has only one."""
    exception: BaseException | None = None
    """What the handler or the decoder raised."""

    def sentence(self) -> str:
        then = "no further attempt" if self.retry_in_ms is None else f"again in {self.retry_in_ms} ms"
        return f"attempt {self.attempt} at record {self.position} failed: {self.error}; {then}"


class ReadFailed(Event, frozen=True, kw_only=True):
    """A read of the shard failed and will be tried again."""

    level = logging.WARNING
    error: str
    failure_count: int

    def sentence(self) -> str:
        return f"read failed ({self.failure_count} in a row): {self.error}"


class ListingFailed(Event, frozen=True, kw_only=True):
    """The stream's shards could not be listed, and will be again; those that are known are read on."""

    level = logging.WARNING
    error: str

    def sentence(self) -> str:
        return f"the shards could not be listed and will be asked for again: {self.error}"


class CheckpointFailed(Event, frozen=True, kw_only=True):
    """A commit got no answer from the store and will be tried again; nothing is lost by it."""

    level = logging.WARNING
    error: str

    def sentence(self) -> str:
        return f"checkpoint not written, and tried again: {self.error}"


class DataLost(Event, frozen=True, kw_only=True):
    """Records were trimmed from the stream before they could be read: whatever arrived between the two times, by the
    service's clock. Told once for each gap, also where nobody can know whether anything was in it.
    """

    level = logging.ERROR
    from_position: str
    """The sequence number after which it was lost; the kind of start where nothing was ever read."""
    read_through_seconds: float | None
    """What arrived before was read; None: that is not known."""
    trimmed_through_seconds: float
    """What arrived before has left the stream."""

    def sentence(self) -> str:
        since = "" if self.read_through_seconds is None else f" from {_moment(self.read_through_seconds)}"
        return (
            f"records after {self.from_position}, of arrivals{since} until {_moment(self.trimmed_through_seconds)}, "
            "left the stream (retention) before they were read"
        )


class Misrouted(Event, frozen=True, kw_only=True):
    """Sub-records were found in a shard that their hash key does not belong to."""

    level = logging.WARNING
    delivered_count: int
    skipped_aggregate_count: int

    def sentence(self) -> str:
        return (
            f"aggregates that straddled a reshard: {self.delivered_count} misrouted records delivered, "
            f"{self.skipped_aggregate_count} aggregates of our own producer skipped (it sends them again)"
        )


class KeysUnordered(Event, frozen=True, kw_only=True):
    """The service places the records of this stream itself (AUTO distribution): a key's records have no order in it."""

    level = logging.WARNING

    def sentence(self) -> str:
        return (
            "the stream distributes records by itself (AUTO): the records of one key may be in any of its shards, and "
            "no order of a key can be kept"
        )


class ZombieCall(Event, frozen=True, kw_only=True):
    """A handler call still runs although its lease may be another member's by now."""

    level = logging.ERROR
    position: str
    fence_token: int
    stack: str = ""
    """Where it stands; empty where that cannot be seen, as in another process."""

    def sentence(self) -> str:
        where = f" and stands at:\n{self.stack}" if self.stack else ""
        return f"the handler of record {self.position} outlived its lease (fence token {self.fence_token}){where}"


class LoopBlocked(Event, frozen=True, kw_only=True):
    """Something keeps the event loop from turning."""

    level = logging.WARNING
    blocked_ms: int
    stack: str

    def sentence(self) -> str:
        return f"the event loop has been blocked for {self.blocked_ms} ms at:\n{self.stack}"


class LoopStalled(Event, frozen=True, kw_only=True):
    """The event loop has stood still for longer than `stall_limit`: this worker gives its shards up."""

    level = logging.ERROR
    blocked_ms: int
    stack: str

    def sentence(self) -> str:
        return (
            f"the event loop has stood still for {self.blocked_ms} ms, longer than stall_limit: no lease is renewed "
            f"until it turns again, and other workers take the shards. It is blocked at:\n{self.stack}"
        )


class TaskRestarted(Event, frozen=True, kw_only=True):
    """A background task ended in an unexpected error and was started again."""

    level = logging.ERROR
    task: str
    error: str
    restart: int

    def sentence(self) -> str:
        return f"{self.task} failed unexpectedly and is started again (restart {self.restart}): {self.error}"


class StreamChanged(Event, frozen=True, kw_only=True):
    """The stream was deleted, or created anew."""

    level = logging.ERROR
    change: str

    def sentence(self) -> str:
        return self.change


def _moment(seconds: float) -> str:
    return dt.datetime.fromtimestamp(seconds, dt.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
