"""What happens inside a consumer or a producer, as values. Logs, metrics and tests use them.

The set of events is closed. Every event names its stream and shard, reads as one sentence (`str(event)`), and has a log
level. `on_event` is called on the event loop as soon as the event happens. It must not block; an error in it is logged
and ignored. A blocked loop cannot report itself: its `LoopBlocked`, `LoopStalled` and `ZombieCall` come from a thread.
"""

import datetime as dt
import logging
import string
from typing import Any, ClassVar, Literal

import msgspec

from anabranch.errors import LeaseStoreCode
from anabranch.measures import TimeBuckets
from anabranch.reasons import Reason


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


class _Sentence(string.Formatter):
    """Fills fields in, and counts: `{call_count:# failed call}` becomes `1 failed call` or `2 failed calls`."""

    def format_field(self, value: Any, format_spec: str) -> Any:
        if format_spec.startswith("# "):
            return _counted(value, format_spec[2:])
        return super().format_field(value, format_spec)


class Event(msgspec.Struct, frozen=True, kw_only=True):
    """Something that happened."""

    level: ClassVar[int] = logging.INFO
    _words: ClassVar[str] = ""
    """The sentence, with names of fields in it."""

    stream: str | None = None
    shard_id: str | None = None

    def __str__(self) -> str:
        where = "/".join(part for part in (self.stream, self.shard_id) if part)
        return f"{where}: {self.sentence()}" if where else self.sentence()

    def sentence(self) -> str:
        return _Sentence().vformat(self._words, (), msgspec.structs.asdict(self))


class ConsumerStarted(Event, frozen=True, kw_only=True):
    """A consumer joined its application."""

    app: str
    member_id: str
    store: str
    version: str
    """Of anabranch."""
    streams: tuple[str, ...]
    region: str | None
    settings: tuple[str, ...]
    """Those that differ from the default, each as `name=value`."""

    def sentence(self) -> str:
        where = "" if self.region is None else f" in {self.region}"
        settings = f"; {', '.join(self.settings)}" if self.settings else ""
        return (
            f"application {self.app!r} started as member {self.member_id}: anabranch {self.version} reads "
            f"{', '.join(self.streams)}{where}, leases in {self.store}{settings}"
        )


class ConsumerProgress(Event, frozen=True, kw_only=True):
    """What a consumer has done in the last minute, and its current state."""

    handled_count: int
    seconds: float
    records_per_second: float
    lag: float | None
    """Seconds, of the worst shard; None if unknown."""
    retention_left: float | None
    """Seconds until the first unfinished record is trimmed; None if unknown."""
    shard_count: int
    stalled_count: int
    failed_count: int
    """Failed handler calls."""
    reason: Reason | None
    """Why the worst shard is stalled; None if none is."""
    worst_shard: str | None
    """Its stream and id; None without shards."""

    def sentence(self) -> str:
        failed = _failed_calls(self.failed_count)
        behind = "lag unknown" if self.lag is None else f"{self.lag:.1f} s behind"
        stalled = f", {self.stalled_count} stalled" if self.stalled_count else ""
        worst = ""
        if self.worst_shard is not None and (self.lag or self.reason):
            worst = f"; worst: {self.worst_shard}{f', {self.reason}' if self.reason else ''}"
        return (
            f"{_counted(self.handled_count, 'record')} in {self.seconds:.0f} s "
            f"({self.records_per_second:.1f} records/s){failed}; "
            f"{behind}; {_counted(self.shard_count, 'shard')}{stalled}{worst}"
        )


class ConsumerFailed(Event, frozen=True, kw_only=True):
    """A consumer failed while its caller was already raising another error, which has this one attached."""

    _words = "the consumer failed while {leaving} was being raised: {error}"
    level = logging.ERROR
    error: str
    leaving: str
    """The type of the other error."""


class ConsumerStopped(Event, frozen=True, kw_only=True):
    """A consumer left its application, or failed: then its leases expire by themselves."""

    leftover_count: int
    handled_count: int
    """Records that were finished in the whole run, dead letters and skipped ones included."""
    committed_count: int
    failed_count: int
    """Failed handler calls."""
    seconds: float
    error: str | None = None
    """Why it failed; None if it did not."""
    dead_letter_count: int = 0
    skipped_count: int = 0

    @property
    def level(self) -> int:  # type: ignore[override]
        return logging.INFO if self.error is None else logging.ERROR

    def sentence(self) -> str:
        left = f", {_counted(self.leftover_count, 'record')} unfinished" if self.leftover_count else ""
        failed = _failed_calls(self.failed_count)
        how, why = ("stopped", "") if self.error is None else ("failed", f": {self.error}")
        unhandled = [_counted(self.dead_letter_count, "dead letter")] if self.dead_letter_count else []
        unhandled += [f"{self.skipped_count} skipped"] if self.skipped_count else []
        done = f"finished ({', '.join(unhandled)})" if unhandled else "handled"
        return (
            f"{how} after {self.seconds:.1f} s: {_counted(self.handled_count, 'record')} {done}, "
            f"{self.committed_count} committed{failed}{left}{why}"
        )


class LeaseTaken(Event, frozen=True, kw_only=True):
    """This worker owns the shard from now on."""

    _words = "lease taken (fence token {fence_token})"
    fence_token: int


LossReason = Literal["taken_over", "member_ended", "row_changed"]


class LeaseLost(Event, frozen=True, kw_only=True):
    """Another worker owns the shard, or may own it."""

    level = logging.WARNING
    reason: LossReason
    """`taken_over`: the row names another worker. `member_ended`: this worker was declared dead, or the store was
    rolled back; `MemberEnded` says which. `row_changed`: somebody freed or replaced the row."""
    owner: str | None = None
    """With `taken_over`: the member that owns the shard now."""

    def sentence(self) -> str:
        if self.reason == "taken_over":
            return f"lease lost: {self.owner} owns it now"
        if self.reason == "member_ended":
            return "lease lost: this worker's membership ended"
        return "lease lost: its row no longer names this worker"


class LeaseRowDeleted(Event, frozen=True, kw_only=True):
    """The shard's lease row was deleted by hand. It was created again, and the other shards continue."""

    level = logging.ERROR
    position: str | None
    """Where reading continues; None if nothing was handled, or if no live worker knew how far the shard was."""
    repeats: bool
    """Whether records may be handled again: its last owner is gone, so the position is an older one, or the start."""

    def sentence(self) -> str:
        begin = "its lease row was deleted by hand, and was created again"
        if not self.repeats:
            return f"{begin}: nothing is repeated"
        return f"{begin}: records after {self.position or 'its starting position'} may be handled again"


class LeaseReleased(Event, frozen=True, kw_only=True):
    """This worker released the shard."""

    _words = "lease released"


class LeaseGiven(Event, frozen=True, kw_only=True):
    """This worker gave the shard to another."""

    _words = "lease given to {to_member}"
    to_member: str


class HandOffKept(Event, frozen=True, kw_only=True):
    """Another worker requested the shard, but handler calls did not end in time: the shard stays here."""

    _words = "rebalance declined: {running_count:# handler call} still running"
    level = logging.WARNING
    running_count: int


class HandOffForced(Event, frozen=True, kw_only=True):
    """Another worker requested the shard, and handler calls did not end in time. With `hand_off="force"` they are
    cancelled, and the shard is given away when they have ended. Its new owner handles their records again.
    """

    _words = "{running_count:# handler call} did not end in time: cancelling, then {to_member} gets the shard"
    level = logging.WARNING
    running_count: int
    to_member: str


class ShardStarted(Event, frozen=True, kw_only=True):
    """Reading begins."""

    position: str
    retried: str | None = None
    """The record at which the shard had stopped, and which is tried again; None if it had not."""

    def sentence(self) -> str:
        again = "" if self.retried is None else f"; record {self.retried}, which had stopped it, is tried again"
        return f"reading from {self.position}{again}"


class ShardProgress(Event, frozen=True, kw_only=True):
    """What flowed through the shard since the last such event: at most one a second, none if nothing did."""

    level = logging.DEBUG
    seconds: float
    read_count: int
    """Kinesis records: an aggregate counts as one."""
    read_bytes: int
    handled_count: int
    handled_bytes: int
    committed_count: int
    failed_count: int
    """Failed handler calls."""
    calls: TimeBuckets
    """How long handler calls took."""
    lag: float | None
    """Seconds; None if unknown, or if the lease is gone."""

    def sentence(self) -> str:
        behind = "" if self.lag is None else f", {self.lag:.1f} s behind"
        return (
            f"{_counted(self.read_count, 'record')} read, {self.handled_count} handled, {self.committed_count} "
            f"committed in {self.seconds:.1f} s{behind}"
        )


class ShardFinished(Event, frozen=True, kw_only=True):
    """The shard's last record is finished."""

    children: tuple[str, ...]
    reason: str = "end"

    def sentence(self) -> str:
        next_ones = ", ".join(self.children) or "none"
        return f"finished ({self.reason}); children: {next_ones}"


class ShardStopped(Event, frozen=True, kw_only=True):
    """The shard is stopped at a record; its lease is kept."""

    _words = "{reason}; its lease is kept; a worker that starts later retries"
    level = logging.ERROR
    reason: Reason
    position: str | None
    partition_key: str | None
    exception: BaseException | None = None
    """What the handler or the decoder raised, if that is the reason."""


class ShardStillStopped(Event, frozen=True, kw_only=True):
    """The shard is still stopped at a record. Reported every five minutes."""

    level = logging.ERROR
    reason: Reason
    lag: float | None
    """The age of the record in seconds; None if unknown."""

    def sentence(self) -> str:
        behind = "" if self.lag is None else f", {self.lag:.0f} s behind"
        return f"still {self.reason}{behind}"


class ShardSuspected(Event, frozen=True, kw_only=True):
    """Several owners in a row ended without progress on the shard: one of its records may have crashed them. Its
    records are handled one at a time, and nothing else runs in this worker meanwhile.
    """

    _words = "{owner_count:# owner} in a row ended without progress: its records are now handled alone"
    level = logging.WARNING
    owner_count: int


class ShardStalled(Event, frozen=True, kw_only=True):
    """The shard is stalled. A hand-over to another worker is no stall, although `status()` names it as a reason."""

    _words = "stalled: {reason}"
    level = logging.WARNING
    reason: Reason


class ShardRecovered(Event, frozen=True, kw_only=True):
    """The shard is no longer stalled."""

    reason: Reason
    """Why it was."""
    seconds: float
    """For how long it was."""
    lag: float | None
    """Seconds; None if unknown."""

    def sentence(self) -> str:
        behind = "" if self.lag is None else f", {self.lag:.1f} s behind"
        return f"reading again after {self.seconds:.0f} s{behind} (it was stalled: {self.reason})"


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
    """One attempt to handle a record, or a batch that begins with it, failed."""

    level = logging.WARNING
    position: str
    partition_key: str
    attempt: int
    record_count: int = 1
    """How many records were handled together."""
    error: str
    retry_in_ms: int | None
    """None after the last attempt: the policy's last step follows. A payload that does not decode has one attempt."""
    exception: BaseException | None = None
    """What the handler or the decoder raised."""

    def sentence(self) -> str:
        then = "no further attempt" if self.retry_in_ms is None else f"retrying in {self.retry_in_ms} ms"
        what = f"record {self.position}"
        if self.record_count > 1:
            what = f"{self.record_count} records from {self.position} on"
        return f"attempt {self.attempt} at {what} failed: {self.error}; {then}"


class RecordSkipped(Event, frozen=True, kw_only=True):
    """A record was skipped by policy or by an operator, and the shard continues."""

    _words = "record {position} of key {partition_key!r} is skipped"
    level = logging.ERROR
    position: str
    partition_key: str


class RecordDeadLettered(Event, frozen=True, kw_only=True):
    """A record is in the dead letters, and the shard continues."""

    level = logging.ERROR
    position: str
    partition_key: str | None
    """None if the record was trimmed from the stream before its letter was written."""
    attempts: int
    error_type: str
    destination: str
    recovered: bool = False
    """The previous owner may have written the letter already; this owner has written it again."""

    def sentence(self) -> str:
        again = ", written again by its new owner" if self.recovered else ""
        return (
            f"record {self.position} failed {_counted(self.attempts, 'time')} with {self.error_type} and is in the "
            f"dead letters ({self.destination}){again}"
        )


class CommandAnswered(Event, frozen=True, kw_only=True):
    """A command of an operator was applied or refused."""

    level = logging.WARNING
    action: str
    position: str | None
    """The record to skip; None for other commands."""
    requested_by: str
    state: str
    result: str

    def sentence(self) -> str:
        what = f"{self.action} {self.position}" if self.position else self.action
        return f"{what}, requested by {self.requested_by}, was {self.state}: {self.result}"


class RetentionRunsOut(Event, frozen=True, kw_only=True):
    """The oldest unfinished record of the shard is about to be trimmed from the stream. Reported when a quarter of the
    retention is left, and again each time the rest has halved.
    """

    level = logging.ERROR
    seconds: float
    """Until the record is trimmed, and lost."""
    lag: float
    """The age of the record."""
    reason: Reason | None = None
    """Why the shard is stalled; None if it is only slow."""

    def sentence(self) -> str:
        left = f"{self.seconds / 3600:.1f} h" if self.seconds >= 3600 else f"{self.seconds / 60:.0f} min"
        why = "it is too slow" if self.reason is None else str(self.reason)
        return f"data loss in {left}: its oldest unfinished record is {self.lag / 3600:.1f} h old; {why}"


class DeadLettersWarning(Event, frozen=True, kw_only=True):
    """The destination of the dead letters works, but something about it should be changed."""

    _words = "dead letters in {destination}: {warning}"
    level = logging.WARNING
    destination: str
    warning: str


class ReadFailed(Event, frozen=True, kw_only=True):
    """A read of the shard failed and will be retried."""

    _words = "read failed ({failure_count} in a row): {error}"
    level = logging.WARNING
    error: str
    failure_count: int


class ReadRecovered(Event, frozen=True, kw_only=True):
    """The shard is read again after reads had failed or had been throttled."""

    throttled: bool
    failure_count: int
    """In a row."""
    seconds: float
    """Since the first of them."""

    def sentence(self) -> str:
        what = "throttled read" if self.throttled else "failed read"
        return f"read again, after {_counted(self.failure_count, what)} in {self.seconds:.1f} s"


class ConsumerRegistered(Event, frozen=True, kw_only=True):
    """With fan-out: the application has a registered consumer of the stream."""

    _words = "reads with fan-out as consumer {consumer} ({arn})"
    consumer: str
    arn: str


class ConsumerDeregistered(Event, frozen=True, kw_only=True):
    """With fan-out: the application's consumer of the stream was removed, or could not be."""

    consumer: str
    error: str | None = None

    def sentence(self) -> str:
        if self.error is None:
            return f"consumer {self.consumer} was removed"
        return (
            f"consumer {self.consumer} could not be removed and costs money until it is: {self.error}. "
            f"Remove it with `anabranch streams consumers rm {self.stream} {self.consumer}`"
        )


class SubscriptionEnded(Event, frozen=True, kw_only=True):
    """With fan-out: a subscription ended early, or was not accepted. Renewals are not reported."""

    _words = "the subscription ended ({failure_count} in a row): {error}"
    level = logging.WARNING
    error: str
    failure_count: int
    """In a row, without an event."""


class FanOutFellBack(Event, frozen=True, kw_only=True):
    """With fan-out: the shard is polled until it can subscribe."""

    _words = "polled for now: {reason}"
    level = logging.WARNING
    reason: Reason


class FanOutReturned(Event, frozen=True, kw_only=True):
    """With fan-out: the shard is subscribed again, and no longer polled."""

    _words = "subscribed again, no longer polled"


class ListingFailed(Event, frozen=True, kw_only=True):
    """The stream's shards could not be listed. The known ones are still used, and the listing is retried."""

    _words = "the shards could not be listed, retrying: {error}"
    level = logging.WARNING
    error: str


class ListingRecovered(Event, frozen=True, kw_only=True):
    """The stream's shards could be listed again."""

    _words = "the shards could be listed again"


class CheckpointFailed(Event, frozen=True, kw_only=True):
    """The store did not answer a commit. It will be retried; nothing is lost."""

    _words = "checkpoint not written, retrying: {error}"
    level = logging.WARNING
    error: str


class CheckpointRecovered(Event, frozen=True, kw_only=True):
    """The store accepts commits again."""

    _words = "checkpoints are written again, after {seconds:.1f} s"
    seconds: float


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

    _words = (
        "aggregates were written during a reshard: {delivered_count:# misrouted record} delivered, "
        "{skipped_aggregate_count:# aggregate} of our own producer skipped (it sends them again)"
    )
    level = logging.WARNING
    delivered_count: int
    skipped_aggregate_count: int


class KeysUnordered(Event, frozen=True, kw_only=True):
    """The service distributes the records of this stream itself (AUTO): records of a key have no order."""

    _words = "the stream distributes records itself (AUTO), so the records of a key cannot be kept in order"
    level = logging.WARNING


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

    _words = "the event loop has been blocked for {blocked_ms} ms at:\n{stack}"
    level = logging.WARNING
    blocked_ms: int
    stack: str


class LoopStalled(Event, frozen=True, kw_only=True):
    """The event loop was blocked for longer than `stall_limit`: this worker gives up its shards."""

    _words = (
        "the event loop has been blocked for {blocked_ms} ms, longer than stall_limit: no lease is renewed "
        "until it runs again, and other workers take the shards. It is blocked at:\n{stack}"
    )
    level = logging.ERROR
    blocked_ms: int
    stack: str


class LoopUnblocked(Event, frozen=True, kw_only=True):
    """The event loop runs again."""

    _words = "the event loop runs again, after it was blocked for {blocked_ms} ms"
    blocked_ms: int


class TaskRestarted(Event, frozen=True, kw_only=True):
    """A background task failed unexpectedly and was restarted."""

    _words = "{task} failed unexpectedly and is restarted (restart {restart}): {error}"
    level = logging.ERROR
    task: str
    error: str
    restart: int


class StreamChanged(Event, frozen=True, kw_only=True):
    """The stream was deleted or created again."""

    _words = "{change}"
    level = logging.ERROR
    change: str


def _failed_calls(count: int) -> str:
    return f", {_counted(count, 'call')} failed" if count else ""


def _moment(seconds: float) -> str:
    return dt.datetime.fromtimestamp(seconds, dt.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


class MemberEvicted(Event, frozen=True, kw_only=True):
    """This worker declared another dead that missed its heartbeats."""

    _words = "worker {member_id} missed its heartbeats: declared dead, taking over its shards"
    level = logging.WARNING
    member_id: str


class MemberDiffers(Event, frozen=True, kw_only=True):
    """A worker with incompatible settings runs in the same application. It should stop by itself."""

    _words = "worker {member_id} runs with incompatible settings ({settings}): stop it"
    level = logging.ERROR
    member_id: str
    settings: str


class MemberEnded(Event, frozen=True, kw_only=True):
    """The store says that this worker's membership has ended; the process joins again as a new member."""

    _words = "member {member_id} ended ({reason}): its shards are no longer handled here"
    level = logging.WARNING
    member_id: str
    reason: str


class MemberJoined(Event, frozen=True, kw_only=True):
    """This process has joined again, as a new member."""

    _words = "joined again as member {member_id}"
    member_id: str


class MetricRefused(Event, frozen=True, kw_only=True):
    """A value of a custom metric was dropped. Reported once for each name."""

    _words = "a value of metric {metric!r} was dropped: {why}"
    level = logging.WARNING
    metric: str
    why: str


class LeaseStoreWarning(Event, frozen=True, kw_only=True):
    """The lease store works, but something about it should be changed."""

    _words = "leases in {store}: {warning}"
    level = logging.WARNING
    store: str
    warning: str


class StoreRolledBack(Event, frozen=True, kw_only=True):
    """The lease store lost acknowledged writes."""

    _words = "the lease store was rolled back: all leases are dropped and taken again after the longest expiry"
    level = logging.ERROR


class StoreReset(Event, frozen=True, kw_only=True):
    """The application's row in the lease store is missing or was replaced."""

    _words = "the lease store no longer has this application: stopping instead of starting over"
    level = logging.CRITICAL


class StoreUnanswered(Event, frozen=True, kw_only=True):
    """The lease store did not answer a call that the consumer needs to continue; it is retried."""

    _words = "the lease store did not answer {failure_count:# time} in a row, retrying: {error}"
    level = logging.WARNING
    error: str
    code: LeaseStoreCode = "no_answer"
    failure_count: int
    """In a row."""


class StoreAnswered(Event, frozen=True, kw_only=True):
    """The lease store answers again."""

    _words = "the lease store answers again, after {failure_count:# failed call} in {seconds:.1f} s"
    failure_count: int
    seconds: float


class AlertFired(Event, frozen=True, kw_only=True):
    """The lag was above the limit of an alert for its whole time. Its stream and shard are those of the worst shard."""

    level = logging.ERROR
    lag: float
    """Seconds, of the worst shard. If no worker handles that shard, the lag is at least this large."""
    limit: float
    seconds: float
    """For how long it was above."""
    reason: Reason | None
    """Why that shard is stalled; None if it moves."""

    def sentence(self) -> str:
        why = "" if self.reason is None else f": {self.reason}"
        return f"ALERT: {self.lag:.1f} s behind, above {self.limit:g} s for {self.seconds:.0f} s{why}"


class AlertCleared(Event, frozen=True, kw_only=True):
    """The lag is below the limit of an alert again, or the shards are another worker's now."""

    lag: float | None
    """None if this worker holds no shard any more."""
    limit: float
    seconds: float
    """For how long the alert was on."""

    def sentence(self) -> str:
        if self.lag is None:
            return f"alert cleared: this worker holds no shard any more, after {self.seconds:.0f} s"
        return f"alert cleared: {self.lag:.1f} s behind, at most {self.limit:g} s again, after {self.seconds:.0f} s"


class AggregationOff(Event, frozen=True, kw_only=True):
    """The producer does not aggregate and keeps no order, because the service distributes records itself (AUTO)."""

    _words = "the stream distributes records itself (AUTO): they are not aggregated, and their order cannot be kept"
    level = logging.WARNING


class AggregateStraddled(Event, frozen=True, kw_only=True):
    """An aggregate was written during a reshard; all its records are sent again."""

    _words = "an aggregate was written during a reshard: {record_count:# record} sent again"
    record_count: int


class ExporterFailed(Event, frozen=True, kw_only=True):
    """Metrics were not exported, or a span was not made. Records are not affected; no count is lost."""

    _words = "exporter {exporter} failed ({failure_count} in a row): {error}"
    level = logging.WARNING
    exporter: str
    error: str
    failure_count: int
    """In a row. Reported for the 1st, 2nd, 4th, 8th, ..."""


class ExporterRecovered(Event, frozen=True, kw_only=True):
    """Metrics are exported, or spans are made, again."""

    _words = "exporter {exporter} works again, after {failure_count:# failure}"
    exporter: str
    failure_count: int


class HookFailed(Event, frozen=True, kw_only=True):
    """A user's callback raised an error; it has no other effect."""

    _words = "{hook} raised {error}"
    level = logging.ERROR
    hook: str
    error: str


class KeyBlocked(Event, frozen=True, kw_only=True):
    """Records failed without being sent, because an earlier record of their key failed and that was not seen yet.
    Emitted at most every ten seconds.
    """

    _words = (
        "{record_count:# record} failed without being sent (last partition key: {partition_key!r}): an "
        "earlier record of that key failed, and that failure was not seen yet. Await its delivery, call flush(), or "
        "pass on_undelivered="
    )
    level = logging.WARNING
    partition_key: str
    """Of the last such record."""
    record_count: int
    """All such records of the stream since the last event."""


class OrderUnconfirmed(Event, frozen=True, kw_only=True):
    """A record got a lower sequence number than one written before it."""

    _words = "sequence number {sequence_number} is below that of the record written before it"
    level = logging.WARNING
    sequence_number: str


class RecordsAbandoned(Event, frozen=True, kw_only=True):
    """A producer was not closed before its event loop or the interpreter ended: records are lost or may be lost."""

    _words = (
        "the producer was not closed: {record_count:# record} not delivered, or failed "
        "unseen. Use `async with`, or await close()"
    )
    level = logging.ERROR
    record_count: int
    """Undelivered records, and failures that were not seen."""


class DeliveryProgress(Event, frozen=True, kw_only=True):
    """What a producer delivered to the stream since the last such event: at most one a second, none if nothing was."""

    level = logging.DEBUG
    seconds: float
    delivered_count: int
    """User records, those in aggregates one by one."""
    delivered_bytes: int
    kinesis_count: int
    """Kinesis records: an aggregate counts as one."""
    failed_count: int
    requests: TimeBuckets
    """How long PutRecords calls took."""

    def sentence(self) -> str:
        failed = f", {self.failed_count} failed" if self.failed_count else ""
        return f"{_counted(self.delivered_count, 'record')} delivered in {self.seconds:.1f} s{failed}"


class WriteFailed(Event, frozen=True, kw_only=True):
    """A whole PutRecords request failed."""

    _words = "a request with {entry_count:# record} failed: {error}"
    level = logging.WARNING
    error: str
    entry_count: int


class WriteRecovered(Event, frozen=True, kw_only=True):
    """Requests succeed again."""

    _words = "requests succeed again, after {failure_count} failed in {seconds:.1f} s"
    failure_count: int
    """Requests that failed since the last success."""
    seconds: float


class WriteUnthrottled(Event, frozen=True, kw_only=True):
    """A shard that was over its limits is written to at the full rate again."""

    _words = "written at the full rate again, after {seconds:.1f} s"
    seconds: float


class WriteThrottled(Event, frozen=True, kw_only=True):
    """A shard is over its limits and refused most of the last records; the producer writes to it more slowly."""

    _words = "over its limits, writing at {share_percent} % of the full rate"
    share_percent: int


class WriterFailed(Event, frozen=True, kw_only=True):
    """The producer ended with an unexpected error; all undelivered records have failed."""

    _words = "the producer failed unexpectedly, with {record_count:# record} not delivered: {error}"
    level = logging.CRITICAL
    error: str
    record_count: int
    """Undelivered records, and failures that were not seen."""
