"""GetShardIterator: a position in a shard, by any of the five types."""

from anabranch.local.actions.action import Answer, Request
from anabranch.local.errors import dry_run, throughput_exceeded
from anabranch.local.lookups import find_readable_stream, find_shard
from anabranch.local.shapes import (
    BOOLEAN,
    ITERATOR_TYPE,
    NAMED_STREAM,
    SEQUENCE_NUMBER,
    SHARD_ID,
    TIMESTAMP,
    StructureShape,
)
from anabranch.local.state.account import Account
from anabranch.local.state.identifiers import ShardIterator, encode_iterator
from anabranch.local.state.positions import StartingPosition, resolve_position

REQUEST = StructureShape(
    {
        **NAMED_STREAM,
        "ShardId": SHARD_ID,
        "ShardIteratorType": ITERATOR_TYPE,
        "StartingSequenceNumber": SEQUENCE_NUMBER,
        "Timestamp": TIMESTAMP,
        "DryRun": BOOLEAN,
    },
    required=("ShardId", "ShardIteratorType"),
)


def get_shard_iterator(account: Account, request: Request, now_ms: int) -> Answer:
    stream = find_readable_stream(account, request)
    shard = find_shard(account, stream, request["ShardId"], now_ms)
    shard.log.trim(account.horizon_ms(stream, now_ms))
    start = StartingPosition(
        request["ShardIteratorType"], request.get("StartingSequenceNumber"), request.get("Timestamp")
    )
    position = resolve_position(shard, start, now_ms, "GetShardIterator", account.stream_label(stream))
    if request.get("DryRun"):
        raise dry_run()
    if account.enforces_limits and not shard.throughput.allows_iterator(now_ms):
        raise throughput_exceeded(shard.shard_id, stream.name, account.settings.account_id)
    iterator = ShardIterator(stream.name, stream.created_ms, shard.index, position, now_ms)
    return {"ShardIterator": encode_iterator(iterator, account.entropy)}
