"""The whole local Kinesis as one pure object: `call(operation, request, now_ms=...)` is the service.

No sockets, no clock, no tasks: `now_ms` is wall time in integer milliseconds, entropy is given at construction,
and the same calls in the same order give the same answers. The HTTP shell and the simulation are two ways to drive
it.

Requests and answers are plain dicts with AWS's member names; members that AWS leaves out are absent. Blobs are
`bytes`, timestamps are `Timestamp` (requests may also hold plain numbers of seconds). Two values are typed for
speed, and msgspec writes both as JSON without help: the records of GetRecords and of subscription events are
`StoredRecord`s, the slots of a PutRecords answer are `PutRecordsResultEntry`s; `.members()` of either is the dict
for other encodings. An error is a raised `LocalError`.

- `serialization.from_json(operation, decoded)` and `from_cbor` turn a decoded body into a request, or raise AWS's
  SerializationException; `call` itself checks constraints (ValidationException).
- `put_records(PutRecordsRequest)` is the fast path: decode a JSON body with
  `msgspec.json.Decoder(PutRecordsRequest)` and, when msgspec refuses it, fall back to the generic path for AWS's
  message.
- `subscribe(request)` is SubscribeToShard. `subscription.poll(now_ms)` gives one event or None; None means wait
  for `on_change` of its shard or for `subscription.next_deadline_ms`, whichever is first. Once
  `subscription.is_over` (look after every poll, events included) the connection ends. Call `subscription.close()`
  when the client goes away.
- `on_change(stream_name, shard_id)` is called after a call took effect, once for each shard that got records, was
  closed or was deleted, or whose subscription was taken over. It must not call back into this object.
- `next_deadline_ms()` is when a pending state change (CREATING to ACTIVE, a delayed split) wants `settle(now_ms)`.
  Every call settles by itself; a shell needs the deadline only so that idle subscribers hear of the change.
- Durability: `journal(entry)` is called once for each change, before the call returns. Entries are opaque bytes;
  framing, checksums and fsync are the shell's. Write entries in order, before any later answer leaves the process,
  and answer after fsync. At start, `restore(entries)`; `snapshot()` gives the entries that make the present state
  anew, for compaction. Entries hold deadlines, so a change that was due while nobody ran takes effect, as of its
  deadline, at the first call after a restart.
- `refused_slots` (a fault) maps indices of a PutRecords request to an ErrorCode: these slots fail, the others are
  written.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from anabranch._model.entropy import Entropy
from anabranch.local.actions.consumers import subscribe_to_shard
from anabranch.local.actions.records import PutRecordsRequest, PutRecordsResponse, put_records
from anabranch.local.actions.registry import ACTIONS, REQUESTS
from anabranch.local.errors import unknown_operation
from anabranch.local.settings import LocalSettings
from anabranch.local.state import journal_entries
from anabranch.local.state.account import Account
from anabranch.local.state.subscription import Subscription
from anabranch.local.validation import validate

__all__ = ["LocalState", "PutRecordsRequest", "PutRecordsResponse"]


class LocalState:
    def __init__(
        self,
        settings: LocalSettings | None = None,
        *,
        entropy: Entropy,
        on_change: Callable[[str, str], None] | None = None,
        journal: Callable[[bytes], None] | None = None,
    ) -> None:
        self.account = Account(settings or LocalSettings(), entropy)
        self.on_change = on_change
        self.journal = journal

    def call(
        self, operation: str, request: Mapping[str, Any], *, now_ms: int, refused_slots: Mapping[int, str] | None = None
    ) -> dict[str, Any]:
        """Any operation but SubscribeToShard."""
        if operation == "PutRecords":
            validate(REQUESTS[operation], request)
            typed = PutRecordsRequest.from_members(request)
            return self.put_records(typed, now_ms=now_ms, refused_slots=refused_slots).members()
        perform = ACTIONS.get(operation)
        if perform is None:
            raise unknown_operation(operation)
        self.settle(now_ms)
        self.account.rates.check_call(operation, now_ms)
        validate(REQUESTS[operation], request)
        answer = perform(self.account, request, now_ms)
        self._publish()
        return answer

    def put_records(
        self, request: PutRecordsRequest, *, now_ms: int, refused_slots: Mapping[int, str] | None = None
    ) -> PutRecordsResponse:
        self.settle(now_ms)
        answer = put_records(self.account, request, now_ms, refused_slots or {})
        self._publish()
        return answer

    def subscribe(self, request: Mapping[str, Any], *, now_ms: int) -> Subscription:
        self.settle(now_ms)
        validate(REQUESTS["SubscribeToShard"], request)
        subscription = subscribe_to_shard(self.account, request, now_ms)
        self._publish()
        return subscription

    def settle(self, now_ms: int) -> None:
        """Apply the state changes whose time has come."""
        deadline_ms = self.account.next_deadline_ms
        if deadline_ms is not None and deadline_ms <= now_ms:
            self.account.settle(now_ms)
            self._publish()

    def next_deadline_ms(self) -> int | None:
        return self.account.next_deadline_ms

    def reset(self) -> None:
        """An empty account again; subscriptions end as their streams are gone."""
        self.account.reset()
        self._publish()

    def snapshot(self) -> Iterator[bytes]:
        return journal_entries.snapshot(self.account)

    def restore(self, journal: Iterable[bytes]) -> None:
        journal_entries.restore(self.account, journal)

    def _publish(self) -> None:
        changes = self.account.take_changes()
        if changes is None:
            return
        if self.journal is not None:
            for entry in journal_entries.encode_changes(self.account, changes):
                self.journal(entry)
        if self.on_change is not None:
            for stream_name, shard_id in changes.shards:
                self.on_change(stream_name, shard_id)
