"""PutRecord: one record. The request is checked, routed and written as a PutRecords of one would be."""

from typing import Final

from anabranch.local.actions.action import Answer, Request
from anabranch.local.errors import dry_run, invalid_argument, throughput_exceeded
from anabranch.local.lookups import find_readable_stream
from anabranch.local.placement import Placement
from anabranch.local.shapes import BOOLEAN, DATA, HASH_KEY, NAMED_STREAM, PARTITION_KEY, SEQUENCE_NUMBER, StructureShape
from anabranch.local.state.account import Account
from anabranch.local.state.identifiers import parse_sequence_number

REQUEST = StructureShape(
    {
        **NAMED_STREAM,
        "Data": DATA,
        "PartitionKey": PARTITION_KEY,
        "ExplicitHashKey": HASH_KEY,
        "SequenceNumberForOrdering": SEQUENCE_NUMBER,
        "DryRun": BOOLEAN,
    },
    required=("Data",),
)

_AHEAD_S: Final = 60  # quick reshards let the seconds in sequence numbers run ahead of the clock


def put_record(account: Account, request: Request, now_ms: int) -> Answer:
    stream = find_readable_stream(account, request)
    data, partition_key = request["Data"], request.get("PartitionKey")
    placement = Placement(stream)
    shard = placement.shard_for(partition_key, request.get("ExplicitHashKey"))
    size_bytes = placement.checked_size(data, partition_key)
    ordering = request.get("SequenceNumberForOrdering")
    if ordering is not None:
        _check_ordering(account, ordering, stream.name, now_ms)
    if request.get("DryRun"):
        raise dry_run()
    if account.enforces_limits and not shard.throughput.allows_write(size_bytes, now_ms):
        raise throughput_exceeded(shard.shard_id, stream.name, account.settings.account_id)
    encryption_type = None if stream.key_id is None else "KMS"
    record = shard.append(data, partition_key, size_bytes, now_ms, encryption_type)
    placement.commit()
    account.mark_appended(stream, shard, [record])
    answer = {"ShardId": shard.shard_id, "SequenceNumber": record.sequence_number}
    if encryption_type is not None:
        answer["EncryptionType"] = encryption_type
    return answer


def _check_ordering(account: Account, text: str, stream_name: str, now_ms: int) -> None:
    """Any number that was given out is kept by all later ones of its shard; one from the future never was."""
    parts = parse_sequence_number(int(text))
    if parts is None or parts.second > now_ms // 1000 + _AHEAD_S:
        raise invalid_argument(
            f"ExclusiveMinimumSequenceNumber {text} used in PutRecord on stream {stream_name} "
            f"under account {account.settings.account_id} is invalid."
        )
