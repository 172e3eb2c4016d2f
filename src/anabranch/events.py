"""What happens inside a consumer or a producer, as values. Logs, metrics and tests use them.

The set of events is closed. Every event names its stream and shard, reads as one sentence (`str(event)`), and has a log
level. `on_event` is called on the event loop as soon as the event happens. It must not block; an error in it is logged
and ignored. `LoopBlocked`, `LoopStalled` and the `ZombieCall` of a blocked loop come from another thread, because a
blocked loop cannot report itself.
"""

import datetime as dt
import logging
from typing import ClassVar

import msgspec

__all__ = [
    "AggregateStraddled",
    "AggregationOff",
    "CheckpointFailed",
    "ConsumerFailed",
    "ConsumerStarted",
    "ConsumerStopped",
    "DataLost",
    "Event",
    "HandOffForced",
    "HandOffKept",
    "HandlerFailed",
    "HookFailed",
    "KeyBlocked",
    "KeysUnordered",
    "LeaseGiven",
    "LeaseLost",
    "LeaseReleased",
    "LeaseTaken",
    "ListingFailed",
    "LoopBlocked",
    "LoopStalled",
    "MemberDiffers",
    "MemberEnded",
    "MemberSealed",
    "Misrouted",
    "OrderChanged",
    "OrderUnconfirmed",
    "ReadFailed",
    "RecordsAbandoned",
    "ShardFinished",
    "ShardMapFailed",
    "ShardStarted",
    "ShardStopped",
    "ShardSuspected",
    "StandstillBegan",
    "StoreReset",
    "StoreRolledBack",
    "StoreUnanswered",
    "StreamChanged",
    "TaskRestarted",
    "WriteFailed",
    "WriteThrottled",
    "WriterFailed",
    "ZombieCall",
]


class Event(msgspec.Struct, frozen=True, kw_only=True):
    """Something that happened."""

    level: ClassVar[int] = logging.INFO

    stream: str | None = None
    shard_id: str | None = None

    def __str__(self) -> str:
        where = "/".join(part for part in (self.stream, self.shard_id) if part)
        return f"{where}: {self.sentence()}" if where else self.sentence()

    def sentence(self) -> str:
        return (type(self).__doc__ or "").strip()


class ConsumerStarted(Event, frozen=True, kw_only=True):
    """A consumer joined its application."""

    app: str
    member_id: str
    store: str

    def sentence(self) -> str:
        return f"application {self.app!r} started as member {self.member_id}, leases in {self.store}"


class ConsumerFailed(Event, frozen=True, kw_only=True):
    """A consumer failed while its caller was already raising another error, which has this one attached."""

    level = logging.ERROR
    error: str
    leaving: str
    """The type of the other error."""

    def sentence(self) -> str:
        return f"the consumer failed while {self.leaving} was being raised: {self.error}"


class ConsumerStopped(Event, frozen=True, kw_only=True):
    """A consumer left its application."""

    leftover_count: int

    def sentence(self) -> str:
        left = f", {self.leftover_count} records are unfinished" if self.leftover_count else ""
        return f"stopped{left}"


class LeaseTaken(Event, frozen=True, kw_only=True):
    """This worker owns the shard from now on."""

    fence_token: int

    def sentence(self) -> str:
        return f"lease taken (fence token {self.fence_token})"


class LeaseLost(Event, frozen=True, kw_only=True):
    """Another worker owns the shard, or may own it."""

    level = logging.WARNING
    reason: str

    def sentence(self) -> str:
        return f"lease lost: {self.reason}"


class LeaseReleased(Event, frozen=True, kw_only=True):
    """This worker released the shard."""

    def sentence(self) -> str:
        return "lease released"


class LeaseGiven(Event, frozen=True, kw_only=True):
    """This worker gave the shard to another."""

    to_member: str

    def sentence(self) -> str:
        return f"lease given to {self.to_member}"


class HandOffKept(Event, frozen=True, kw_only=True):
    """Another worker requested the shard, but handler calls did not end in time: the shard stays here."""

    level = logging.WARNING
    running_count: int

    def sentence(self) -> str:
        return f"rebalance declined: {self.running_count} handler calls still running"


class HandOffForced(Event, frozen=True, kw_only=True):
    """Another worker requested the shard, and handler calls did not end in time: they are cancelled
    (`hand_off="force"`). The shard is given away when they have ended; its new owner handles their records again.
    """

    level = logging.WARNING
    running_count: int
    to_member: str

    def sentence(self) -> str:
        return (
            f"{self.running_count} handler calls did not end in time and are cancelled: the shard goes to "
            f"{self.to_member} when they have ended"
        )


class ShardStarted(Event, frozen=True, kw_only=True):
    """Reading begins."""

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
    """The shard is stopped at a record; its lease is kept."""

    level = logging.ERROR
    reason: str
    position: str | None
    partition_key: str | None
    exception: BaseException | None = None
    """What the handler or the decoder raised, if that is the reason."""

    def sentence(self) -> str:
        at = f" at record {self.position} (partition key {self.partition_key!r})" if self.position else ""
        return f"stopped{at}: {self.reason}; its lease is kept; a worker that starts later retries"


class ShardSuspected(Event, frozen=True, kw_only=True):
    """Several owners in a row ended without progress on the shard: one of its records may have crashed them. Its
    records are handled one at a time, and nothing else runs in this worker meanwhile.
    """

    level = logging.WARNING
    owner_count: int

    def sentence(self) -> str:
        return f"{self.owner_count} owners in a row ended without progress: its records are now handled alone"


class StandstillBegan(Event, frozen=True, kw_only=True):
    """The shard is stalled."""

    level = logging.WARNING
    reason: str

    def sentence(self) -> str:
        return f"stalled: {self.reason}"


class OrderChanged(Event, frozen=True, kw_only=True):
    """The shard was handled in another order before: `order=` or the kind of consumption changed."""

    before: str
    now: str
    repeats: bool
    """Records that were finished above the checkpoint are handled again."""

    @property
    def level(self) -> int:  # type: ignore[override]
        return logging.WARNING if self.repeats else logging.INFO

    def sentence(self) -> str:
        then = "records finished above the checkpoint are handled again" if self.repeats else "nothing is repeated"
        return f"order changed from {self.before!r} to {self.now!r}: {then}"


class HandlerFailed(Event, frozen=True, kw_only=True):
    """One attempt to handle a record failed."""

    level = logging.WARNING
    position: str
    partition_key: str
    attempt: int
    error: str
    retry_in_ms: int | None
    """None after the last attempt; then the shard stops. A payload that does not decode is tried once."""
    exception: BaseException | None = None
    """What the handler or the decoder raised."""

    def sentence(self) -> str:
        then = "no further attempt" if self.retry_in_ms is None else f"retrying in {self.retry_in_ms} ms"
        return f"attempt {self.attempt} at record {self.position} failed: {self.error}; {then}"


class ReadFailed(Event, frozen=True, kw_only=True):
    """A read of the shard failed and will be retried."""

    level = logging.WARNING
    error: str
    failure_count: int

    def sentence(self) -> str:
        return f"read failed ({self.failure_count} in a row): {self.error}"


class ListingFailed(Event, frozen=True, kw_only=True):
    """The stream's shards could not be listed. Known shards are still read, and the listing is retried."""

    level = logging.WARNING
    error: str

    def sentence(self) -> str:
        return f"the shards could not be listed, retrying: {self.error}"


class CheckpointFailed(Event, frozen=True, kw_only=True):
    """The store did not answer a commit. It will be retried; nothing is lost."""

    level = logging.WARNING
    error: str

    def sentence(self) -> str:
        return f"checkpoint not written, retrying: {self.error}"


class DataLost(Event, frozen=True, kw_only=True):
    """Records that arrived between the two times, by the service's clock, were trimmed before they were read. Reported
    once per gap, even if it is unknown whether there were any records.
    """

    level = logging.ERROR
    from_position: str
    """The last sequence number before the gap, or the starting position if nothing was read."""
    read_through_seconds: float | None
    """Records that arrived before this time were read; None if unknown."""
    trimmed_through_seconds: float
    """Records that arrived before this time were trimmed."""

    def sentence(self) -> str:
        since = "" if self.read_through_seconds is None else f" from {_moment(self.read_through_seconds)}"
        return (
            f"records after {self.from_position} that arrived{since} until {_moment(self.trimmed_through_seconds)} "
            "were trimmed (retention) before they were read"
        )


class Misrouted(Event, frozen=True, kw_only=True):
    """Aggregates contained records whose hash keys belong to another shard."""

    level = logging.WARNING
    delivered_count: int
    skipped_aggregate_count: int

    def sentence(self) -> str:
        return (
            f"aggregates were written during a reshard: {self.delivered_count} misrouted records delivered, "
            f"{self.skipped_aggregate_count} aggregates of our own producer skipped (it sends them again)"
        )


class KeysUnordered(Event, frozen=True, kw_only=True):
    """The service distributes the records of this stream itself (AUTO): records of a key have no order."""

    level = logging.WARNING

    def sentence(self) -> str:
        return (
            "the stream distributes records itself (AUTO): records of one key may be in any shard, so their order "
            "cannot be kept"
        )


class ZombieCall(Event, frozen=True, kw_only=True):
    """A handler call still runs although its lease may belong to another worker by now."""

    level = logging.ERROR
    position: str
    fence_token: int
    stack: str = ""
    """Its stack; empty if unknown, as in another process."""

    def sentence(self) -> str:
        where = f" and is at:\n{self.stack}" if self.stack else ""
        return f"the handler of record {self.position} outlived its lease (fence token {self.fence_token}){where}"


class LoopBlocked(Event, frozen=True, kw_only=True):
    """The event loop is blocked."""

    level = logging.WARNING
    blocked_ms: int
    stack: str

    def sentence(self) -> str:
        return f"the event loop has been blocked for {self.blocked_ms} ms at:\n{self.stack}"


class LoopStalled(Event, frozen=True, kw_only=True):
    """The event loop was blocked for longer than `stall_limit`: this worker gives up its shards."""

    level = logging.ERROR
    blocked_ms: int
    stack: str

    def sentence(self) -> str:
        return (
            f"the event loop has been blocked for {self.blocked_ms} ms, longer than stall_limit: no lease is renewed "
            f"until it runs again, and other workers take the shards. It is blocked at:\n{self.stack}"
        )


class TaskRestarted(Event, frozen=True, kw_only=True):
    """A background task failed unexpectedly and was restarted."""

    level = logging.ERROR
    task: str
    error: str
    restart: int

    def sentence(self) -> str:
        return f"{self.task} failed unexpectedly and is restarted (restart {self.restart}): {self.error}"


class StreamChanged(Event, frozen=True, kw_only=True):
    """The stream was deleted or created again."""

    level = logging.ERROR
    change: str

    def sentence(self) -> str:
        return self.change


def _moment(seconds: float) -> str:
    return dt.datetime.fromtimestamp(seconds, dt.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


class MemberSealed(Event, frozen=True, kw_only=True):
    """This worker declared another dead that missed its heartbeats."""

    level = logging.WARNING
    member_id: str

    def sentence(self) -> str:
        return f"worker {self.member_id} missed its heartbeats: declared dead, taking over its shards"


class MemberDiffers(Event, frozen=True, kw_only=True):
    """A worker with incompatible settings runs in the same application. It should have been refused, and should stop by
    itself.
    """

    level = logging.ERROR
    member_id: str
    fingerprint: str

    def sentence(self) -> str:
        return f"worker {self.member_id} runs with incompatible settings ({self.fingerprint}): stop it"


class MemberEnded(Event, frozen=True, kw_only=True):
    """The store says that this worker's membership has ended; the process joins again as a new member."""

    level = logging.WARNING
    member_id: str
    reason: str

    def sentence(self) -> str:
        return f"member {self.member_id} ended ({self.reason}): its shards are no longer handled here"


class StoreRolledBack(Event, frozen=True, kw_only=True):
    """The lease store lost acknowledged writes."""

    level = logging.ERROR

    def sentence(self) -> str:
        return "the lease store was rolled back: all leases are dropped and taken again after the longest expiry"


class StoreReset(Event, frozen=True, kw_only=True):
    """The application's row in the lease store is missing or was replaced."""

    level = logging.CRITICAL

    def sentence(self) -> str:
        return "the lease store no longer has this application: stopping instead of starting over"


class StoreUnanswered(Event, frozen=True, kw_only=True):
    """The lease store did not answer a call that the consumer needs to continue; it is retried."""

    level = logging.WARNING
    error: str
    failure_count: int
    """In a row."""

    def sentence(self) -> str:
        return f"the lease store did not answer {self.failure_count} times in a row, retrying: {self.error}"


class AggregationOff(Event, frozen=True, kw_only=True):
    """The producer does not aggregate and keeps no order, because the service distributes records itself (AUTO)."""

    level = logging.WARNING


class AggregateStraddled(Event, frozen=True, kw_only=True):
    """An aggregate was written during a reshard; all its records are sent again."""

    record_count: int

    def sentence(self) -> str:
        return f"an aggregate was written during a reshard: its {self.record_count} records are sent again"


class HookFailed(Event, frozen=True, kw_only=True):
    """A user's callback raised an error; it has no other effect."""

    level = logging.ERROR
    hook: str
    error: str

    def sentence(self) -> str:
        return f"{self.hook} raised {self.error}"


class KeyBlocked(Event, frozen=True, kw_only=True):
    """Records failed without being sent, because an earlier record of their key failed and nobody has seen that yet.

    Emitted at most every ten seconds.
    """

    level = logging.WARNING
    partition_key: str
    """Of the last such record."""
    record_count: int
    """All such records of the stream since the last event."""

    def sentence(self) -> str:
        return (
            f"{self.record_count} records failed without being sent (last partition key: {self.partition_key!r}): an "
            "earlier record of that key failed, and nobody has seen that failure. Await its delivery, call flush(), or "
            "pass on_undelivered="
        )


class OrderUnconfirmed(Event, frozen=True, kw_only=True):
    """A record got a lower sequence number than one written before it."""

    level = logging.WARNING
    sequence_number: str

    def sentence(self) -> str:
        return f"sequence number {self.sequence_number} is below that of the record written before it"


class RecordsAbandoned(Event, frozen=True, kw_only=True):
    """A producer was not closed before its event loop or the interpreter ended: records are lost or may be lost."""

    level = logging.ERROR
    record_count: int
    """Undelivered records, and failures that nobody has seen."""

    def sentence(self) -> str:
        return (
            f"the producer was not closed: {self.record_count} records were not delivered, or nobody saw that they "
            "failed. Use `async with`, or await close()"
        )


class ShardMapFailed(Event, frozen=True, kw_only=True):
    """The stream's shards could not be listed; the producer continues with the known ones."""

    level = logging.WARNING
    error: str

    def sentence(self) -> str:
        return f"the shards could not be listed, retrying: {self.error}"


class WriteFailed(Event, frozen=True, kw_only=True):
    """A whole PutRecords request failed."""

    level = logging.WARNING
    error: str
    entry_count: int

    def sentence(self) -> str:
        records = "1 record" if self.entry_count == 1 else f"{self.entry_count} records"
        return f"a request with {records} failed: {self.error}"


class WriteThrottled(Event, frozen=True, kw_only=True):
    """A shard is over its limits and refused most of the last records; the producer writes to it more slowly."""

    share_percent: int

    def sentence(self) -> str:
        return f"over its limits, writing at {self.share_percent} % of the full rate"


class WriterFailed(Event, frozen=True, kw_only=True):
    """The producer ended with an unexpected error; all undelivered records have failed."""

    level = logging.CRITICAL
    error: str
    record_count: int
    """Undelivered records, and failures that nobody has seen."""

    def sentence(self) -> str:
        return f"the producer failed unexpectedly, with {self.record_count} records not delivered: {self.error}"
