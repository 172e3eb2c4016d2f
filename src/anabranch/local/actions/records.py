"""Writing and reading records.

PutRecords is the hot path: msgspec decodes, checks and encodes typed values. If its check fails, the generic validator
finds AWS's message. A rejected request writes nothing; a throttled one writes the entries that the limits allow.
"""

from collections.abc import Mapping
from typing import Annotated

import msgspec
from msgspec import Meta

from anabranch import limits
from anabranch._model.hash_keys import md5_hash_key
from anabranch.local.actions.calls import Answer, Call, action
from anabranch.local.errors import (
    THROUGHPUT_EXCEEDED,
    dry_run,
    expired_iterator,
    invalid_argument,
    shard_not_found,
    slot_message,
    throughput_exceeded,
)
from anabranch.local.shapes import HASH_KEY, STREAM, null_member, validate
from anabranch.local.state.account import Account
from anabranch.local.state.identifiers import (
    ShardIterator,
    decode_iterator,
    may_be_issued,
    shard_id_of,
    write_token,
)
from anabranch.local.state.shard import Shard, StoredRecord
from anabranch.local.state.stream import Stream


def _shard_for(stream: Stream, partition_key: str | None, explicit_hash_key: str | None, slot: int | None) -> Shard:
    """`slot` is the index of the record in PutRecords. A stream with AUTO distribution ignores the keys of its records
    and uses its open shards in turn.
    """
    routing = stream.routing
    if stream.distribution == "AUTO":
        return routing.open_shards[(stream.placed_count + (slot or 0)) % len(routing.open_shards)]
    if partition_key is None:
        raise null_member("partitionKey" if slot is None else f"records.{slot + 1}.member.partitionKey")
    if explicit_hash_key is None:
        return routing.shard_for(md5_hash_key(partition_key))
    hash_key = int(explicit_hash_key)
    if hash_key > limits.HASH_KEY_MAX:
        raise invalid_argument(
            "Invalid ExplicitHashKey. ExplicitHashKey must be in the range: [0, 2^128-1]. "
            f"Specified value was {explicit_hash_key}"
        )
    return routing.shard_for(hash_key)


def _checked_size(stream: Stream, data: bytes, partition_key: str | None) -> int:
    size_bytes = len(data) + (0 if partition_key is None else len(partition_key.encode()))
    if size_bytes > stream.max_record_kib * limits.KIB:
        raise invalid_argument(
            f"A record of {size_bytes} bytes (data and partition key) is larger than the maximum record size of "
            f"{stream.max_record_kib * limits.KIB} bytes of stream {stream.name}: see UpdateMaxRecordSize."
        )
    return size_bytes


@action("PutRecord")
def put_record(call: Call) -> Answer:
    """One record, checked, routed and written like a PutRecords entry."""
    stream = call.find_readable_stream()
    data, partition_key = call.request["Data"], call.request.get("PartitionKey")
    shard = _shard_for(stream, partition_key, call.request.get("ExplicitHashKey"), None)
    size_bytes = _checked_size(stream, data, partition_key)
    ordering = call.request.get("SequenceNumberForOrdering")
    if ordering is not None:
        _check_ordering(call, ordering, stream)
    call.check_dry_run()
    if call.account.enforces_limits and not shard.throughput.allows_write(size_bytes, call.now_ms):
        raise throughput_exceeded(shard.shard_id, stream.name, call.account_id)
    encryption_type = None if stream.key_id is None else "KMS"
    record = shard.append(data, partition_key, size_bytes, call.now_ms, encryption_type)
    stream.placed_count += 1
    call.account.mark_appended(stream, shard, [record])
    answer = {"ShardId": shard.shard_id, "SequenceNumber": record.sequence_number}
    if encryption_type is not None:
        answer["EncryptionType"] = encryption_type
    return answer


def _check_ordering(call: Call, text: str, stream: Stream) -> None:
    """Later records of a shard always get higher numbers, so this only rejects numbers that were never issued."""
    latest = max(call.now_ms // 1000, *(shard.latest_second for shard in stream.shards.values()))
    if not may_be_issued(int(text), latest):
        raise invalid_argument(
            f"ExclusiveMinimumSequenceNumber {text} used in PutRecord on {call.label(stream)} is invalid."
        )


class PutRecordsEntry(msgspec.Struct, frozen=True, gc=False, rename="pascal"):
    data: Annotated[bytes, Meta(max_length=limits.RECORD_BYTES_MAX)]
    partition_key: Annotated[str, Meta(min_length=1, max_length=limits.PARTITION_KEY_CHARACTERS_MAX)] | None = None
    explicit_hash_key: Annotated[str, Meta(pattern=rf"^(?:{HASH_KEY.pattern})\Z")] | None = None


class PutRecordsRequest(msgspec.Struct, frozen=True, rename="pascal"):
    records: Annotated[list[PutRecordsEntry], Meta(min_length=1, max_length=limits.PUT_RECORDS_ENTRIES_MAX)]
    stream_name: str | None = None
    stream_arn: str | None = msgspec.field(name="StreamARN", default=None)
    stream_id: str | None = None
    dry_run: bool | None = None

    def stream_members(self) -> dict[str, str]:
        names = {"StreamName": self.stream_name, "StreamARN": self.stream_arn, "StreamId": self.stream_id}
        return {name: value for name, value in names.items() if value is not None}


class PutRecordsResultEntry(msgspec.Struct, frozen=True, gc=False, omit_defaults=True, rename="pascal"):
    sequence_number: str | None = None
    shard_id: str | None = None
    error_code: str | None = None
    error_message: str | None = None


class PutRecordsResponse(msgspec.Struct, frozen=True, omit_defaults=True, rename="pascal"):
    failed_record_count: int
    records: list[PutRecordsResultEntry]
    encryption_type: str | None = None


def put_records(
    account: Account, request: PutRecordsRequest, now_ms: int, refused_slots: Mapping[int, str]
) -> PutRecordsResponse:
    call = Call("PutRecords", account, request.stream_members(), now_ms)
    validate(STREAM, call.request)
    stream = call.find_readable_stream()
    slots = [
        (
            entry,
            _shard_for(stream, entry.partition_key, entry.explicit_hash_key, slot),
            _checked_size(stream, entry.data, entry.partition_key),
        )
        for slot, entry in enumerate(request.records)
    ]
    if sum(size_bytes for _, _, size_bytes in slots) > limits.PUT_RECORDS_BYTES_MAX:
        raise invalid_argument(f"Records size exceeds {limits.PUT_RECORDS_BYTES_MAX >> 20} MB limit")
    if request.dry_run:
        raise dry_run()
    stream.placed_count += len(slots)
    encryption_type = None if stream.key_id is None else "KMS"
    is_limited = account.enforces_limits
    results: list[PutRecordsResultEntry] = []
    appended: dict[Shard, list[StoredRecord]] = {}
    failed = 0
    for index, (entry, shard, size_bytes) in enumerate(slots):
        code = refused_slots.get(index)
        if code is None and is_limited and not shard.throughput.allows_write(size_bytes, now_ms):
            code = THROUGHPUT_EXCEEDED
        if code is not None:
            failed += 1
            message = slot_message(code, shard.shard_id, stream.name, call.account_id)
            results.append(PutRecordsResultEntry(error_code=code, error_message=message))
            continue
        record = shard.append(entry.data, entry.partition_key, size_bytes, now_ms, encryption_type)
        appended.setdefault(shard, []).append(record)
        results.append(PutRecordsResultEntry(record.sequence_number, shard.shard_id))
    for shard, records in appended.items():
        account.mark_appended(stream, shard, records)
    return PutRecordsResponse(failed, results, encryption_type)


@action("GetShardIterator")
def get_shard_iterator(call: Call) -> Answer:
    stream, shard = call.find_readable_shard()
    kind, number = call.request["ShardIteratorType"], call.request.get("StartingSequenceNumber")
    position = call.find_position(stream, shard, kind, number, call.request.get("Timestamp"))
    call.check_dry_run()
    if call.account.enforces_limits and not shard.throughput.iterators.take(1, call.now_ms):
        raise throughput_exceeded(shard.shard_id, stream.name, call.account_id)
    return {"ShardIterator": _new_iterator(call, stream, shard, position)}


@action("GetRecords")
def get_records(call: Call) -> Answer:
    """A response that reaches the end of a closed shard has ChildShards and no NextShardIterator."""
    iterator = decode_iterator(call.request["ShardIterator"])
    if iterator is None:
        raise invalid_argument("Invalid ShardIterator.")
    stream, shard = _find_by_iterator(call, iterator)
    lifetime_ms = call.account.settings.scaled_ms(limits.SHARD_ITERATOR_LIFETIME_MS)
    if call.now_ms - iterator.issued_ms > lifetime_ms:
        raise expired_iterator(iterator.issued_ms, call.now_ms, lifetime_ms)
    call.check_dry_run()
    if call.account.enforces_limits and not shard.throughput.allows_read(call.now_ms):
        raise throughput_exceeded(shard.shard_id, stream.name, call.account_id)
    log = shard.log
    log.trim(call.horizon_ms(stream))
    begin = log.index_at(int(iterator.position))
    end = log.end_of_read(begin, call.request.get("Limit", limits.GET_RECORDS_COUNT_MAX), limits.GET_RECORDS_BYTES_MAX)
    if call.account.enforces_limits:
        shard.throughput.read_bytes.charge(log.bytes_between(begin, end), call.now_ms)
    answer: Answer = {"Records": log.records[begin:end], "MillisBehindLatest": log.behind_ms(end, call.now_ms)}
    if end == len(log.records) and not shard.is_open:
        answer["ChildShards"] = stream.children_of(shard)
    else:
        following = log.numbers[end - 1] + 1 if end > begin else int(iterator.position)
        answer["NextShardIterator"] = _new_iterator(call, stream, shard, following)
    return answer


def _new_iterator(call: Call, stream: Stream, shard: Shard, position: int) -> str:
    nonce = call.account.entropy.getrandbits(64)
    return write_token(ShardIterator(stream.name, stream.created_ms, shard.index, str(position), call.now_ms, nonce))


def _find_by_iterator(call: Call, iterator: ShardIterator) -> tuple[Stream, Shard]:
    shard_id = shard_id_of(iterator.shard_index)
    stream = call.account.streams.get(iterator.stream_name)
    if stream is None or stream.status == "CREATING" or stream.created_ms != iterator.stream_created_ms:
        raise shard_not_found(shard_id, iterator.stream_name, call.account_id)
    if call.request.get("StreamARN", stream.arn) != stream.arn:
        raise invalid_argument(f"StreamARN {call.request['StreamARN']} is not the stream of the ShardIterator.")
    return stream, call.find_shard(stream, shard_id)
