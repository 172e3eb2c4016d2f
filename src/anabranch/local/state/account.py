"""Everything that one account has in one region: the root of the state.

It owns the lifecycle of streams and consumers (what begins now and ends at a deadline), the table of live
subscriptions, and the list of what a call changed, which the journal and the subscribers are told of afterwards.
Time only ever comes in as an argument; a deadline that has passed is applied as of the deadline.
"""

import msgspec

from anabranch._model.entropy import Entropy
from anabranch.local.errors import LocalError, limit_exceeded, not_found, stream_not_found
from anabranch.local.settings import LocalSettings
from anabranch.local.state.commitment import Commitment
from anabranch.local.state.consumer import Consumer
from anabranch.local.state.record_log import StoredRecord
from anabranch.local.state.resharding import merge, scale, split
from anabranch.local.state.shard import Shard
from anabranch.local.state.stream import Change, EncryptionChange, MergeChange, ScaleChange, SplitChange, Stream
from anabranch.local.state.subscription import Subscription
from anabranch.local.state.throughput import CallRates

__all__ = ["Account", "Changes"]


class Changes(msgspec.Struct):
    """What happened since it was last asked; dicts serve as ordered sets."""

    removed: dict[str, None] = {}
    written: dict[str, None] = {}
    """Streams whose description, shards or consumers are other than before."""
    appended: list[tuple[str, str, list[StoredRecord]]] = []
    commitment: bool = False
    shards: dict[tuple[str, str], None] = {}
    """Shards that a subscriber may want to look at again."""


class Account:
    def __init__(self, settings: LocalSettings, entropy: Entropy) -> None:
        self.settings = settings
        self.entropy = entropy
        self.streams: dict[str, Stream] = {}
        self.commitment = Commitment()
        self.subscriptions: dict[tuple[str, str], Subscription] = {}
        """By consumer ARN and shard id."""
        self.rates = CallRates(settings.account_id, enforced=self.enforces_limits)
        self.next_deadline_ms: int | None = None
        self._changes: Changes | None = None

    @property
    def enforces_limits(self) -> bool:
        return self.settings.limits == "aws"

    @property
    def open_shard_count(self) -> int:
        return sum(stream.open_shard_count for stream in self.streams.values())

    def stream_arn(self, name: str) -> str:
        place = self.settings
        return f"arn:{place.partition}:kinesis:{place.region}:{place.account_id}:stream/{name}"

    def place_of(self, stream: Stream) -> str:
        """How messages name a stream."""
        return f"stream {stream.name} under account {self.settings.account_id}"

    def horizon_ms(self, stream: Stream, now_ms: int) -> int:
        return stream.horizon_ms(now_ms, self.settings.time_scale)

    def check_shard_room(self, additional: int) -> None:
        present, limit = self.open_shard_count, self.settings.shard_limit
        if present + additional > limit:
            raise limit_exceeded(
                "This request would exceed the shard limit for the account "
                f"{self.settings.account_id} in {self.settings.region}. "
                f"Current shard count for the account: {present}. Limit: {limit}. "
                f"Number of additional shards that would have resulted from this request: {additional}. "
                "Refer to the AWS Service Limits page "
                "(http://docs.aws.amazon.com/general/latest/gr/aws_service_limits.html) "
                "for current limits and how to request higher limits."
            )

    # What begins now and ends at a deadline.

    def add_stream(self, stream: Stream, now_ms: int) -> None:
        self.streams[stream.name] = stream
        self._begin(stream, now_ms)

    def update_stream(self, stream: Stream, now_ms: int, change: Change | None = None) -> None:
        """UPDATING until the deadline; the change takes effect then."""
        stream.status = "UPDATING"
        stream.change = change
        self._begin(stream, now_ms)

    def delete_stream(self, stream: Stream, now_ms: int) -> None:
        stream.status = "DELETING"
        stream.change = None
        self._begin(stream, now_ms)

    def add_consumer(self, stream: Stream, consumer: Consumer, now_ms: int) -> None:
        stream.consumers[consumer.name] = consumer
        self._begin_consumer(stream, consumer, now_ms)

    def delete_consumer(self, stream: Stream, consumer: Consumer, now_ms: int) -> None:
        consumer.status = "DELETING"
        self._begin_consumer(stream, consumer, now_ms)

    def settle(self, now_ms: int) -> None:
        """Apply every deadline that has passed, each as of its own time."""
        for stream in list(self.streams.values()):
            for consumer in list(stream.consumers.values()):
                self._settle_consumer(stream, consumer, now_ms)
            self._settle_stream(stream, now_ms)
        self.plan_deadline()

    def plan_deadline(self) -> None:
        planned = [
            deadline_ms
            for stream in self.streams.values()
            for deadline_ms in (stream.deadline_ms, *(c.deadline_ms for c in stream.consumers.values()))
        ]
        self.next_deadline_ms = min((deadline_ms for deadline_ms in planned if deadline_ms is not None), default=None)

    # What changed.

    def note_written(self, stream: Stream) -> None:
        self._noted().written[stream.name] = None

    def note_appended(self, stream: Stream, shard: Shard, records: list[StoredRecord]) -> None:
        changes = self._noted()
        changes.appended.append((stream.name, shard.shard_id, records))
        changes.shards[stream.name, shard.shard_id] = None

    def note_commitment(self) -> None:
        self._noted().commitment = True

    def take_changes(self) -> Changes | None:
        changes, self._changes = self._changes, None
        return changes

    # Subscriptions.

    def add_subscription(self, subscription: Subscription, now_ms: int) -> None:
        key = subscription.consumer_arn, subscription.shard_id
        previous = self.subscriptions.get(key)
        if previous is not None and not previous.is_over:
            previous.end(
                LocalError(
                    "ResourceInUseException",
                    "Another active subscription exists for this consumer: "
                    f"{subscription.consumer_arn} on {subscription.shard_id} was taken over by a newer call.",
                )
            )
            self._noted().shards[subscription.stream_name, subscription.shard_id] = None
        self.subscriptions = {k: s for k, s in self.subscriptions.items() if not s.is_over or s.is_fresh(now_ms)}
        self.subscriptions[key] = subscription

    def reset(self) -> None:
        for stream in list(self.streams.values()):
            self._remove_stream(stream)
        self.commitment = Commitment()
        self.note_commitment()
        self.plan_deadline()

    def _noted(self) -> Changes:
        if self._changes is None:
            self._changes = Changes()
        return self._changes

    def _begin(self, stream: Stream, now_ms: int) -> None:
        stream.deadline_ms = now_ms + self.settings.scaled_ms(self.settings.state_delay_ms)
        self.note_written(stream)
        self._settle_stream(stream, now_ms)
        self.plan_deadline()

    def _begin_consumer(self, stream: Stream, consumer: Consumer, now_ms: int) -> None:
        consumer.deadline_ms = now_ms + self.settings.scaled_ms(self.settings.state_delay_ms)
        self.note_written(stream)
        self._settle_consumer(stream, consumer, now_ms)
        self.plan_deadline()

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
            self._reshard(stream, change, at_ms)
        self.note_written(stream)

    def _reshard(self, stream: Stream, change: SplitChange | MergeChange | ScaleChange, at_ms: int) -> None:
        before = list(stream.routing.open_shards)
        if isinstance(change, SplitChange):
            split(stream, stream.shards[change.shard_id], int(change.new_starting_hash_key), at_ms)
        elif isinstance(change, MergeChange):
            merge(stream, stream.shards[change.shard_id], stream.shards[change.adjacent_shard_id], at_ms)
        else:
            scale(stream, change.target_shard_count, at_ms)
        self._noted().shards.update({(stream.name, s.shard_id): None for s in before if not s.is_open})

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
        self.note_written(stream)

    def _remove_stream(self, stream: Stream) -> None:
        del self.streams[stream.name]
        changes = self._noted()
        changes.removed[stream.name] = None
        changes.written.pop(stream.name, None)
        error = stream_not_found(stream.name, self.settings.account_id)
        self._end_subscriptions([s for s in self.subscriptions.values() if s.stream_name == stream.name], error)

    def _end_subscriptions(self, ended: list[Subscription], error: LocalError) -> None:
        for subscription in ended:
            subscription.end(error)
            del self.subscriptions[subscription.consumer_arn, subscription.shard_id]
            self._noted().shards[subscription.stream_name, subscription.shard_id] = None
