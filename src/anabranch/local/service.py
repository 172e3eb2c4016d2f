"""The Kinesis service as one pure object: `call(operation, request, now_ms=...)`.

No sockets, no clock, no tasks: `now_ms` is wall time in milliseconds, entropy is passed at construction, and the same
calls in the same order give the same answers. The HTTP server and the simulation both drive this object.

Requests and answers are plain dicts with AWS's member names, without absent members. Blobs are `bytes`, timestamps are
`Timestamp` (requests may also have seconds as plain numbers). Records are structs (`StoredRecord`), for speed: msgspec
writes them as JSON, and `.members()` is the dict for other encodings. Errors are raised as `LocalError`.

- `on_change(stream_name, shard_id)` is called after a call took effect, once for each shard that got records, was
  closed or deleted, or whose subscription was taken over. It must not call back into this object.
- `journal(entry)` is called once for each change, before the call returns. Write the entries in order, and respond
  after fsync. At start, pass them to `restore`. A change that was due while no process ran takes effect at the first
  call after the restart, as of its deadline.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final, cast

import msgspec

from anabranch._model.entropy import Entropy
from anabranch.errors import CodecError
from anabranch.local.actions.calls import ACTIONS, Call
from anabranch.local.actions.consumers import subscribe_to_shard
from anabranch.local.actions.records import PutRecordsRequest, PutRecordsResponse, put_records
from anabranch.local.errors import LocalError
from anabranch.local.settings import LocalSettings
from anabranch.local.shapes import REQUESTS, validate
from anabranch.local.state.account import (
    Account,
    CommitmentWritten,
    Entry,
    RecordsAppended,
    StreamRemoved,
    StreamWritten,
)
from anabranch.local.state.shard import Shard
from anabranch.local.state.stream import Routing, Stream
from anabranch.local.state.subscription import Subscription

_SNAPSHOT_BYTES: Final = 4 << 20  # of records in one entry, unless a single record is larger


def _to_row(value: Any) -> Any:
    return value.to_row() if isinstance(value, Shard) else None  # the routing is rebuilt from the shards


def _from_row(kind: type, row: Any) -> Any:
    return Shard.from_row(row) if kind is Shard else Routing()


_ENCODER: Final = msgspec.msgpack.Encoder(enc_hook=_to_row)
_DECODER: Final = msgspec.msgpack.Decoder(Entry, dec_hook=_from_row)


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
        """Any operation except SubscribeToShard. `refused_slots` (a fault) maps indices of PutRecords entries to an
        ErrorCode: these entries fail, the others are written.
        """
        if operation == "PutRecords":
            validate(REQUESTS[operation], request)
            typed = msgspec.convert(request, PutRecordsRequest)
            written = self.put_records(typed, now_ms=now_ms, refused_slots=refused_slots)
            return cast("dict[str, Any]", msgspec.to_builtins(written))
        perform = ACTIONS.get(operation)
        if perform is None:
            raise LocalError("UnknownOperationException", f"There is no operation {operation} in this service.")
        self.settle(now_ms)
        self.account.check_call_rate(operation, now_ms)
        validate(REQUESTS[operation], request)
        answer = perform(Call(operation, self.account, request, now_ms))
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
        """SubscribeToShard. After `poll` returned None, wait for `on_change` of the shard or for `next_deadline_ms`.
        Check `is_over` after every poll, and call `close()` when the client disconnects.
        """
        self.settle(now_ms)
        validate(REQUESTS["SubscribeToShard"], request)
        subscription = subscribe_to_shard(Call("SubscribeToShard", self.account, request, now_ms))
        self._publish()
        return subscription

    def settle(self, now_ms: int) -> None:
        """Applies the state changes that are due. Every call does this too; a server calls it when a change is due, so
        that idle subscribers see it.
        """
        deadline_ms = self.account.next_deadline_ms
        if deadline_ms is not None and deadline_ms <= now_ms:
            self.account.settle(now_ms)
            self._publish()

    def next_deadline_ms(self) -> int | None:
        """When the next state change (CREATING to ACTIVE, a delayed split) is due."""
        return self.account.next_deadline_ms

    def reset(self) -> None:
        """Deletes everything in the account. Subscriptions end because their streams are gone."""
        self.account.reset()
        self._publish()

    def snapshot(self) -> Iterator[bytes]:
        """The shortest journal that restores the present state."""
        yield _ENCODER.encode(CommitmentWritten(self.account.commitment))
        for stream in self.account.streams.values():
            yield _ENCODER.encode(StreamWritten(stream))
            for shard in stream.shards.values():
                log = shard.log
                begin = log.begin
                while begin < len(log.records):
                    end = log.end_of_read(begin, len(log.records), _SNAPSHOT_BYTES)
                    yield _ENCODER.encode(RecordsAppended(stream.name, shard.shard_id, log.records[begin:end]))
                    begin = end

    def restore(self, journal: Iterable[bytes], *, salvage: bool = False) -> int:
        """Returns how many entries could not be used. Without `salvage`, the first one is an error."""
        unusable = 0
        for position, raw in enumerate(journal):
            try:
                _apply(self.account, raw, position)
            except CodecError:
                if not salvage:
                    raise
                unusable += 1
        self.account.update_next_deadline()
        return unusable

    def _publish(self) -> None:
        entries, shards = self.account.take_changes()
        if self.journal is not None:
            for entry in entries:
                self.journal(_ENCODER.encode(entry))
        if self.on_change is not None:
            for stream_name, shard_id in shards:
                self.on_change(stream_name, shard_id)


def _apply(account: Account, raw: bytes, position: int) -> None:
    try:
        entry = _DECODER.decode(raw)
    except (msgspec.DecodeError, ValueError, TypeError) as error:
        raise CodecError(f"journal entry {position} cannot be decoded: {error}") from error
    match entry:
        case StreamWritten(stream):
            _keep_records(account.streams.get(stream.name), stream)
            account.streams[stream.name] = stream
        case StreamRemoved(stream_name):
            account.streams.pop(stream_name, None)
        case CommitmentWritten(commitment):
            account.commitment = commitment
        case RecordsAppended(stream_name, shard_id, records):
            written = account.streams.get(stream_name)
            if written is None or shard_id not in written.shards:
                raise CodecError(
                    f"journal entry {position} has records of {shard_id} in stream {stream_name}, "
                    "but no earlier entry describes that shard: an entry is missing"
                )
            for record in records:
                written.shards[shard_id].restore(record)


def _keep_records(previous: Stream | None, stream: Stream) -> None:
    if previous is not None and previous.created_ms == stream.created_ms:
        for shard_id, shard in stream.shards.items():
            if shard_id in previous.shards:
                shard.log = previous.shards[shard_id].log
