"""PutRecords: up to 500 records, each with an outcome of its own.

The hot path: typed values that msgspec reads and writes by itself, one pass of checks, one pass of writes. What
looks wrong is handed to the generic validator, which knows the service's words. A request that is refused has
written nothing; one that is throttled has written the slots that fitted.
"""

import re
from collections.abc import Mapping
from typing import Any, Final

import msgspec

from anabranch.limits import (
    PARTITION_KEY_CHARACTERS_MAX,
    PUT_RECORDS_BYTES_MAX,
    PUT_RECORDS_ENTRIES_MAX,
    RECORD_BYTES_MAX,
)
from anabranch.local.actions.action import Answer, Request
from anabranch.local.errors import THROUGHPUT_EXCEEDED, dry_run, invalid_argument, slot_message
from anabranch.local.lookups import find_readable_stream
from anabranch.local.placement import Placement
from anabranch.local.shapes import (
    BOOLEAN,
    DATA,
    HASH_KEY,
    NAMED_STREAM,
    PARTITION_KEY,
    ListShape,
    StructureShape,
)
from anabranch.local.state.account import Account
from anabranch.local.state.shard import Shard, StoredRecord
from anabranch.local.validation import validate

__all__ = ["PutRecordsEntry", "PutRecordsRequest", "PutRecordsResponse", "PutRecordsResultEntry", "put_records"]

REQUEST = StructureShape(
    {
        "Records": ListShape(
            item=StructureShape(
                {"Data": DATA, "ExplicitHashKey": HASH_KEY, "PartitionKey": PARTITION_KEY}, required=("Data",)
            ),
            length_min=1,
            length_max=PUT_RECORDS_ENTRIES_MAX,
        ),
        **NAMED_STREAM,
        "DryRun": BOOLEAN,
    },
    required=("Records",),
)

_STREAM: Final = StructureShape({**NAMED_STREAM})
_HASH_KEY: Final = re.compile(HASH_KEY.pattern or "")


class PutRecordsEntry(msgspec.Struct, frozen=True, gc=False, omit_defaults=True, rename="pascal"):
    data: bytes
    partition_key: str | None = None
    explicit_hash_key: str | None = None

    def members(self) -> dict[str, Any]:
        keys = {"PartitionKey": self.partition_key, "ExplicitHashKey": self.explicit_hash_key}
        return {"Data": self.data, **{name: value for name, value in keys.items() if value is not None}}


class PutRecordsRequest(
    msgspec.Struct,
    frozen=True,
    omit_defaults=True,
    rename={
        "records": "Records",
        "stream_name": "StreamName",
        "stream_arn": "StreamARN",
        "stream_id": "StreamId",
        "dry_run": "DryRun",
    },
):
    records: list[PutRecordsEntry]
    stream_name: str | None = None
    stream_arn: str | None = None
    stream_id: str | None = None
    dry_run: bool | None = None

    @classmethod
    def from_members(cls, request: Request) -> "PutRecordsRequest":
        entries = [
            PutRecordsEntry(entry["Data"], entry.get("PartitionKey"), entry.get("ExplicitHashKey"))
            for entry in request["Records"]
        ]
        return cls(
            entries,
            request.get("StreamName"),
            request.get("StreamARN"),
            request.get("StreamId"),
            request.get("DryRun"),
        )

    def stream_members(self) -> dict[str, str]:
        names = {"StreamName": self.stream_name, "StreamARN": self.stream_arn, "StreamId": self.stream_id}
        return {name: value for name, value in names.items() if value is not None}


class PutRecordsResultEntry(msgspec.Struct, frozen=True, gc=False, omit_defaults=True, rename="pascal"):
    sequence_number: str | None = None
    shard_id: str | None = None
    error_code: str | None = None
    error_message: str | None = None

    def members(self) -> dict[str, str]:
        if self.sequence_number is not None and self.shard_id is not None:
            return {"SequenceNumber": self.sequence_number, "ShardId": self.shard_id}
        return {"ErrorCode": self.error_code or "", "ErrorMessage": self.error_message or ""}


class PutRecordsResponse(msgspec.Struct, frozen=True, omit_defaults=True, rename="pascal"):
    failed_record_count: int
    records: list[PutRecordsResultEntry]
    encryption_type: str | None = None

    def members(self) -> Answer:
        answer: dict[str, Any] = {"FailedRecordCount": self.failed_record_count, "Records": self.records}
        if self.encryption_type is not None:
            answer["EncryptionType"] = self.encryption_type
        return answer


def put_records(
    account: Account, request: PutRecordsRequest, now_ms: int, refused_slots: Mapping[int, str]
) -> PutRecordsResponse:
    _check_entries(request)
    stream = find_readable_stream(account, request.stream_members())
    placement = Placement(stream)
    slots = [
        (
            entry,
            placement.shard_for(entry.partition_key, entry.explicit_hash_key, slot),
            placement.checked_size(entry.data, entry.partition_key),
        )
        for slot, entry in enumerate(request.records)
    ]
    if sum(size_bytes for _, _, size_bytes in slots) > PUT_RECORDS_BYTES_MAX:
        raise invalid_argument(f"Records size exceeds {PUT_RECORDS_BYTES_MAX >> 20} MB limit")
    if request.dry_run:
        raise dry_run()
    placement.commit()
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
            message = slot_message(code, shard.shard_id, stream.name, account.settings.account_id)
            results.append(PutRecordsResultEntry(error_code=code, error_message=message))
            continue
        record = shard.append(entry.data, entry.partition_key, size_bytes, now_ms, encryption_type)
        if shard in appended:
            appended[shard].append(record)
        else:
            appended[shard] = [record]
        results.append(PutRecordsResultEntry(record.sequence_number, shard.shard_id))
    for shard, records in appended.items():
        account.mark_appended(stream, shard, records)
    return PutRecordsResponse(failed, results, encryption_type)


def _check_entries(request: PutRecordsRequest) -> None:
    records = request.records
    is_right = 1 <= len(records) <= PUT_RECORDS_ENTRIES_MAX and all(
        len(entry.data) <= RECORD_BYTES_MAX
        and (entry.partition_key is None or 0 < len(entry.partition_key) <= PARTITION_KEY_CHARACTERS_MAX)
        and (entry.explicit_hash_key is None or _HASH_KEY.fullmatch(entry.explicit_hash_key) is not None)
        for entry in records
    )
    if is_right:
        validate(_STREAM, request.stream_members())
    else:
        validate(REQUEST, {"Records": [entry.members() for entry in records], **request.stream_members()})
