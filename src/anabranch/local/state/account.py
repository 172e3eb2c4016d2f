"""The state of one account in one region.

Owns the lifecycle of streams and consumers, the active subscriptions, and the changes that the journal and the
subscribers have not seen yet. A change takes effect as of its deadline, even if the next call comes later.
"""

from collections.abc import Iterable
from typing import Any, Final, TypeAlias

import msgspec

from anabranch._model.entropy import Entropy
from anabranch.local.errors import LocalError, in_use, limit_exceeded, not_found, stream_not_found
from anabranch.local.settings import LocalSettings
from anabranch.local.state.identifiers import Timestamp
from anabranch.local.state.shard import Shard, StoredRecord
from anabranch.local.state.stream import Change, Consumer, EncryptionChange, Stream, reshard
from anabranch.local.state.subscription import Subscription
from anabranch.local.state.throughput import CALLS_PER_SECOND, TokenBucket

COMMITMENT_MS: Final = 24 * 3_600_000
SHARD_LIMIT: Final = 20_000  # open shards per account: AWS's default in its three largest regions
_RECORD_OVERHEAD_BYTES: Final = 100


class Commitment(msgspec.Struct, kw_only=True):
    """The account's minimum throughput billing commitment, which unlocks warm throughput and more consumers.

    It lasts at least a day: an earlier DISABLED takes effect then, unless it is enabled again before.
    """

    started_ms: int | None = None
    earliest_end_ms: int = 0
    ends_ms: int | None = None
    """When it ended or will end; None until it is disabled."""

    def is_enabled(self, now_ms: int) -> bool:
        return self.started_ms is not None and (self.ends_ms is None or now_ms < self.ends_ms)

    def enable(self, now_ms: int, duration_ms: int) -> None:
        if self.is_enabled(now_ms):
            self.ends_ms = None
        else:
            self.started_ms, self.earliest_end_ms, self.ends_ms = now_ms, now_ms + duration_ms, None

    def disable(self, now_ms: int) -> None:
        if self.is_enabled(now_ms) and self.ends_ms is None:
            self.ends_ms = max(now_ms, self.earliest_end_ms)

    def members(self, now_ms: int) -> dict[str, Any]:
        if self.started_ms is None:
            return {"Status": "DISABLED"}
        members: dict[str, Any] = {"StartedAt": Timestamp.from_milliseconds(self.started_ms)}
        if self.is_enabled(now_ms):
            members["Status"] = "ENABLED" if self.ends_ms is None else "ENABLED_UNTIL_EARLIEST_ALLOWED_END"
            members["EarliestAllowedEndAt"] = Timestamp.from_milliseconds(self.earliest_end_ms)
        else:
            members["Status"] = "DISABLED"
            members["EndedAt"] = Timestamp.from_milliseconds(self.ends_ms or now_ms)
        return members


# Journal entries: all state except subscriptions and rates, which do not survive a restart.
#
# An entry states the result, not the request: a stream's whole description, the appended records, a deleted stream. So
# a replay does not run the operations again, and a repeated entry changes nothing. MessagePack has no integers above 64
# bits: such numbers are strings.


class StreamWritten(msgspec.Struct, tag="stream", array_like=True):
    stream: Stream


class StreamRemoved(msgspec.Struct, tag="removed", array_like=True):
    stream_name: str


class RecordsAppended(msgspec.Struct, tag="records", array_like=True):
    stream_name: str
    shard_id: str
    records: list[StoredRecord]


class CommitmentWritten(msgspec.Struct, tag="commitment", array_like=True):
    commitment: Commitment


Entry: TypeAlias = StreamWritten | StreamRemoved | RecordsAppended | CommitmentWritten


class Account:
    def __init__(self, settings: LocalSettings, entropy: Entropy) -> None:
        self.settings = settings
        self.entropy = entropy
        self.streams: dict[str, Stream] = {}
        self.commitment = Commitment()
        self.subscriptions: dict[tuple[str, str], Subscription] = {}
        """By consumer ARN and shard id."""
        self._call_rates: dict[object, TokenBucket] = {}
        self.next_deadline_ms: int | None = None
        self._entries: dict[object, Entry] = {}
        """What the journal has not seen yet, by what changed: a stream, a shard's records, or the commitment (None)."""
        self._changed_shards: dict[tuple[str, str], None] = {}
        """Shards whose subscribers must look again. A dict serves as an ordered set."""

    @property
    def enforces_limits(self) -> bool:
        return self.settings.limits == "aws"

    @property
    def open_shard_count(self) -> int:
        return sum(stream.open_shard_count for stream in self.streams.values())

    def stream_arn(self, name: str) -> str:
        settings = self.settings
        return f"arn:{settings.partition}:kinesis:{settings.region}:{settings.account_id}:stream/{name}"

    def check_shard_room(self, additional: int) -> None:
        present = self.open_shard_count
        if present + additional > SHARD_LIMIT:
            raise limit_exceeded(
                "This request would exceed the shard limit for the account "
                f"{self.settings.account_id} in {self.settings.region}. "
                f"Current shard count for the account: {present}. Limit: {SHARD_LIMIT}. "
                f"Number of additional shards that would have resulted from this request: {additional}. "
                "Refer to the AWS Service Limits page "
                "(http://docs.aws.amazon.com/general/latest/gr/aws_service_limits.html) "
                "for current limits and how to request higher limits."
            )

    def check_call_rate(self, operation: str, now_ms: int) -> None:
        per_second = CALLS_PER_SECOND.get(operation)
        if per_second is not None and not self.allows_call(operation, per_second, now_ms):
            raise limit_exceeded(f"Rate exceeded for {operation} under account {self.settings.account_id}.")

    def allows_call(self, key: object, per_second: int, now_ms: int) -> bool:
        """`key` names what is counted: the calls of an operation, or the subscriptions of a consumer to a shard."""
        if not self.enforces_limits:
            return True
        return self._call_rates.setdefault(key, TokenBucket(per_second)).take(1, now_ms)

    # The lifecycle of streams and consumers

    def add_stream(self, stream: Stream, now_ms: int) -> None:
        self.streams[stream.name] = stream
        self._begin(stream, stream, now_ms)

    def update_stream(self, stream: Stream, now_ms: int, change: Change | None = None) -> None:
        """UPDATING until the deadline, when the change takes effect."""
        stream.status = "UPDATING"
        stream.change = change
        self._begin(stream, stream, now_ms)

    def add_consumer(self, stream: Stream, consumer: Consumer, now_ms: int) -> None:
        stream.consumers[consumer.name] = consumer
        self._begin(stream, consumer, now_ms)

    def delete(self, stream: Stream, deleted: Stream | Consumer, now_ms: int) -> None:
        """Deletes the stream, or one of its consumers."""
        deleted.status = "DELETING"
        self._begin(stream, deleted, now_ms)

    def settle(self, now_ms: int) -> None:
        """Applies every deadline that has passed, each as of its own time."""
        for stream in list(self.streams.values()):
            for consumer in list(stream.consumers.values()):
                self._settle_consumer(stream, consumer, now_ms)
            self._settle_stream(stream, now_ms)
        self.update_next_deadline()

    def free_expired(self, now_ms: int) -> None:
        """Removes expired shards, and frees the memory of expired records, which reads never return."""
        for stream in self.streams.values():
            horizon_ms = stream.horizon_ms(now_ms, self.settings.time_scale)
            stream.forget_expired_shards(horizon_ms)
            for shard in stream.shards.values():
                shard.log.trim(horizon_ms)
                shard.log.free()

    @property
    def size_bytes(self) -> int:
        """The approximate size of a snapshot."""
        logs = [shard.log for stream in self.streams.values() for shard in stream.shards.values()]
        return sum(log.bytes_between(log.begin, len(log.records)) + len(log) * _RECORD_OVERHEAD_BYTES for log in logs)

    def update_next_deadline(self) -> None:
        planned = [
            deadline_ms
            for stream in self.streams.values()
            for deadline_ms in (stream.deadline_ms, *(c.deadline_ms for c in stream.consumers.values()))
        ]
        self.next_deadline_ms = min((deadline_ms for deadline_ms in planned if deadline_ms is not None), default=None)

    # Changes for the journal and the subscribers

    def mark_written(self, stream: Stream) -> None:
        """The description, the shards or the consumers of the stream changed."""
        self._entries[stream.name] = StreamWritten(stream)

    def mark_appended(self, stream: Stream, shard: Shard, records: list[StoredRecord]) -> None:
        key = stream.name, shard.shard_id
        self._entries[key] = RecordsAppended(*key, records)
        self._changed_shards[key] = None

    def mark_commitment(self) -> None:
        self._entries[None] = CommitmentWritten(self.commitment)

    def take_changes(self) -> tuple[Iterable[Entry], Iterable[tuple[str, str]]]:
        """The journal entries, and the shards that changed, since the last call."""
        entries, shards = self._entries, self._changed_shards
        self._entries, self._changed_shards = {}, {}
        return entries.values(), shards

    def add_subscription(self, subscription: Subscription, now_ms: int) -> None:
        key = subscription.consumer_arn, subscription.shard_id
        previous = self.subscriptions.get(key)
        if previous is not None and not previous.is_over:
            error = in_use(
                "Another active subscription exists for this consumer: "
                f"{subscription.consumer_arn} on {subscription.shard_id} was taken over by a newer call."
            )
            self._end_subscriptions([previous], error)
        self.subscriptions = {k: s for k, s in self.subscriptions.items() if not s.is_over or s.is_fresh(now_ms)}
        self.subscriptions[key] = subscription

    def reset(self) -> None:
        for stream in list(self.streams.values()):
            self._remove_stream(stream)
        self.commitment = Commitment()
        self.mark_commitment()
        self.update_next_deadline()

    def _begin(self, stream: Stream, changing: Stream | Consumer, now_ms: int) -> None:
        changing.deadline_ms = now_ms + self.settings.scaled_ms(self.settings.state_delay_ms)
        self.mark_written(stream)
        self.settle(now_ms)

    def _settle_stream(self, stream: Stream, now_ms: int) -> None:
        if stream.deadline_ms is None or stream.deadline_ms > now_ms:
            return
        if stream.status == "DELETING":
            self._remove_stream(stream)
            return
        at_ms, change = stream.deadline_ms, stream.change
        stream.status, stream.deadline_ms, stream.change = "ACTIVE", None, None
        if isinstance(change, EncryptionChange):
            stream.key_id = change.key_id
        elif change is not None:
            closed = reshard(stream, change, at_ms)
            self._changed_shards.update({(stream.name, shard.shard_id): None for shard in closed})
        self.mark_written(stream)

    def _settle_consumer(self, stream: Stream, consumer: Consumer, now_ms: int) -> None:
        if consumer.deadline_ms is None or consumer.deadline_ms > now_ms:
            return
        consumer.deadline_ms = None
        if consumer.status == "DELETING":
            del stream.consumers[consumer.name]
            error = not_found(f"Consumer {consumer.arn} not found.")
            self._end_subscriptions([s for s in self.subscriptions.values() if s.consumer_arn == consumer.arn], error)
        else:
            consumer.status = "ACTIVE"
        self.mark_written(stream)

    def _remove_stream(self, stream: Stream) -> None:
        del self.streams[stream.name]
        self._entries[stream.name] = StreamRemoved(stream.name)
        error = stream_not_found(stream.name, self.settings.account_id)
        self._end_subscriptions([s for s in self.subscriptions.values() if s.stream_name == stream.name], error)

    def _end_subscriptions(self, ended: list[Subscription], error: LocalError) -> None:
        for subscription in ended:
            subscription.end(error)
            del self.subscriptions[subscription.consumer_arn, subscription.shard_id]
            self._changed_shards[subscription.stream_name, subscription.shard_id] = None
