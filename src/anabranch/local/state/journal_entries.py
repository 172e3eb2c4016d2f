"""The state as a sequence of journal entries: everything that a restart needs.

An entry states the result, not the request: a stream's whole description, the appended records, a deleted stream. So a
replay needs no logic of any operation, entries may repeat, and a snapshot is the shortest journal with the same result.
Numbers above 64 bits are strings. Subscriptions and rates do not survive a restart.
"""

from collections.abc import Iterable, Iterator
from typing import Any, Final, TypeAlias

import msgspec

from anabranch.errors import CodecError
from anabranch.local.state.account import Account, Changes, Commitment
from anabranch.local.state.shard import Shard, StoredRecord
from anabranch.local.state.stream import Routing, Stream

_SNAPSHOT_BYTES: Final = 4 << 20  # in one entry, unless a single record is larger


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


_Entry: TypeAlias = StreamWritten | StreamRemoved | RecordsAppended | CommitmentWritten


def _to_row(value: Any) -> Any:
    return value.to_row() if isinstance(value, Shard) else None  # the routing is rebuilt from the shards


def _from_row(kind: type, row: Any) -> Any:
    return Shard.from_row(row) if kind is Shard else Routing()


_ENCODER: Final = msgspec.msgpack.Encoder(enc_hook=_to_row)
_DECODER: Final = msgspec.msgpack.Decoder(_Entry, dec_hook=_from_row)


def encode_changes(account: Account, changes: Changes) -> Iterator[bytes]:
    for stream_name in changes.removed:
        yield _ENCODER.encode(StreamRemoved(stream_name))
    for stream_name in changes.written:
        yield _ENCODER.encode(StreamWritten(account.streams[stream_name]))
    for stream_name, shard_id, records in changes.appended:
        yield _ENCODER.encode(RecordsAppended(stream_name, shard_id, records))
    if changes.commitment:
        yield _ENCODER.encode(CommitmentWritten(account.commitment))


def snapshot(account: Account) -> Iterator[bytes]:
    yield _ENCODER.encode(CommitmentWritten(account.commitment))
    for stream in account.streams.values():
        yield _ENCODER.encode(StreamWritten(stream))
        for shard in stream.shards.values():
            log = shard.log
            begin = log.begin
            while begin < len(log.records):
                end = log.index_after(begin, len(log.records), _SNAPSHOT_BYTES)
                yield _ENCODER.encode(RecordsAppended(stream.name, shard.shard_id, log.records[begin:end]))
                begin = end


def restore(account: Account, entries: Iterable[bytes], *, salvage: bool = False) -> int:
    """Returns how many entries could not be used. Without `salvage`, the first one is an error."""
    unusable = 0
    for position, raw in enumerate(entries):
        try:
            _apply(account, raw, position)
        except CodecError:
            if not salvage:
                raise
            unusable += 1
    account.update_next_deadline()
    return unusable


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
        case _:
            _append(account, entry, position)


def _keep_records(previous: Stream | None, stream: Stream) -> None:
    if previous is not None and previous.created_ms == stream.created_ms:
        for shard_id, shard in stream.shards.items():
            if shard_id in previous.shards:
                shard.log = previous.shards[shard_id].log


def _append(account: Account, appended: RecordsAppended, position: int) -> None:
    stream = account.streams.get(appended.stream_name)
    shard = None if stream is None else stream.shards.get(appended.shard_id)
    if shard is None:
        raise CodecError(
            f"journal entry {position} has records of {appended.shard_id} in stream {appended.stream_name}, "
            "but no earlier entry describes that shard: an entry is missing"
        )
    for record in appended.records:
        shard.restore(record)
