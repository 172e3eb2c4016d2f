"""GetRecords: the records from an iterator on, and the iterator that goes on from there.

The answer that reaches the end of a closed shard has ChildShards and no NextShardIterator, whether it carries
records or not.
"""

from typing import Final

from anabranch.limits import GET_RECORDS_BYTES_MAX, GET_RECORDS_COUNT_MAX, SHARD_ITERATOR_LIFETIME_MS
from anabranch.local.actions.action import Answer, Request
from anabranch.local.errors import (
    dry_run,
    expired_iterator,
    invalid_argument,
    shard_not_found,
    stream_not_found,
    throughput_exceeded,
)
from anabranch.local.shapes import BOOLEAN, PAGE_SIZE, STREAM_BY_ARN, StringShape, StructureShape
from anabranch.local.state.account import Account
from anabranch.local.state.identifiers import ShardIterator, decode_iterator, encode_iterator, shard_id_of
from anabranch.local.state.shard import Shard
from anabranch.local.state.stream import Stream

REQUEST = StructureShape(
    {
        "ShardIterator": StringShape(length_min=1, length_max=512),
        "Limit": PAGE_SIZE,
        **STREAM_BY_ARN,
        "DryRun": BOOLEAN,
    },
    required=("ShardIterator",),
)

_AFTER: Final = 1  # the next sequence number that could be read


def get_records(account: Account, request: Request, now_ms: int) -> Answer:
    iterator = decode_iterator(request["ShardIterator"])
    if iterator is None:
        raise invalid_argument("Invalid ShardIterator.")
    stream, shard = _find(account, request, iterator, now_ms)
    lifetime_ms = account.settings.scaled_ms(SHARD_ITERATOR_LIFETIME_MS)
    if now_ms - iterator.issued_ms > lifetime_ms:
        raise expired_iterator(iterator.issued_ms, now_ms, lifetime_ms)
    if request.get("DryRun"):
        raise dry_run()
    if account.enforces_limits and not shard.throughput.allows_read(now_ms):
        raise throughput_exceeded(shard.shard_id, stream.name, account.settings.account_id)
    log = shard.log
    log.trim(account.horizon_ms(stream, now_ms))
    begin = log.index_at(iterator.position)
    end = log.index_after(begin, request.get("Limit", GET_RECORDS_COUNT_MAX), GET_RECORDS_BYTES_MAX)
    if account.enforces_limits:
        shard.throughput.charge_read(log.bytes_between(begin, end), now_ms)
    answer: Answer = {"Records": log.records[begin:end], "MillisBehindLatest": log.behind_ms(end, now_ms)}
    if end == len(log.records) and not shard.is_open:
        answer["ChildShards"] = stream.children_of(shard)
    else:
        position = log.numbers[end - 1] + _AFTER if end > begin else iterator.position
        following = iterator._replace(position=position, issued_ms=now_ms)
        answer["NextShardIterator"] = encode_iterator(following, account.entropy)
    return answer


def _find(account: Account, request: Request, iterator: ShardIterator, now_ms: int) -> tuple[Stream, Shard]:
    owner, shard_id = account.settings.account_id, shard_id_of(iterator.shard_index)
    stream = account.streams.get(iterator.stream_name)
    if stream is None or stream.status == "CREATING":
        raise stream_not_found(iterator.stream_name, owner)
    if request.get("StreamARN", stream.arn) != stream.arn:
        raise invalid_argument(f"StreamARN {request['StreamARN']} is not the stream that the ShardIterator is of.")
    shard = stream.shard(shard_id, account.horizon_ms(stream, now_ms))
    if shard is None or stream.created_ms != iterator.stream_created_ms:
        raise shard_not_found(shard_id, stream.name, owner)
    return stream, shard
