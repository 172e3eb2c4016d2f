"""Bodies of the calls that write: PutRecord and PutRecords.

A request is built as pieces of at most 64 KiB: hashing and writing them one by one costs less than one large body, and
a record of megabytes is encoded slice by slice.
"""

from collections.abc import Sequence
from typing import Final

import msgspec
from pybase64 import b64encode

from anabranch._model.streams import StreamName
from anabranch._wire.bodies import AnswerDecoder, Buffer, encode_request, stream_members
from anabranch._wire.messages import PutRecordResponse, PutRecordsEntry, PutRecordsResponse, PutRecordsResultEntry
from anabranch.errors import CodecError

__all__ = [
    "PIECE_BYTES_MAX",
    "decode_put_record",
    "decode_put_records",
    "encode_put_record",
    "encode_put_records",
]

PIECE_BYTES_MAX: Final = 64 << 10
_SLICE_BYTES: Final = PIECE_BYTES_MAX // 4 * 3  # fills a piece in base64, and is cut between its groups of three
_WHOLE_BYTES_MAX: Final = _SLICE_BYTES // 2  # with its keys it fits into one piece

_encode_text: Final = msgspec.json.Encoder().encode


class _PutRecord(msgspec.Struct, rename="pascal"):
    shard_id: str
    sequence_number: str


class _PutRecords(msgspec.Struct, rename="pascal"):
    records: list[PutRecordsResultEntry]
    failed_record_count: int | None = None


_PUT_RECORD: Final = AnswerDecoder("PutRecord", _PutRecord)
_PUT_RECORDS: Final = AnswerDecoder("PutRecords", _PutRecords)


def encode_put_record(stream: StreamName, entry: PutRecordsEntry) -> list[bytes]:
    return _pieces(_stream(stream), b',"Data":"', (entry,), b"")


def encode_put_records(stream: StreamName, entries: Sequence[PutRecordsEntry]) -> list[bytes]:
    return _pieces(_stream(stream) + b',"Records":[', b'{"Data":"', entries, b"]}")


def _stream(stream: StreamName) -> bytes:
    """The stream's member with the brace before it."""
    return encode_request(stream_members(stream))[0][:-1]


def _pieces(before: bytes, opening: bytes, entries: Sequence[PutRecordsEntry], after: bytes) -> list[bytes]:
    """`opening` is what stands before the first entry's base64; every entry ends with its brace."""
    pieces: list[bytes] = []
    parts = [before]
    size = len(before)
    size_max = PIECE_BYTES_MAX - len(after)
    for entry in entries:
        data, keys = entry.data, _keys(entry)
        is_large = len(data) > _WHOLE_BYTES_MAX
        encoded = b"" if is_large else b64encode(data)
        entry_size = len(opening) + len(encoded) + len(keys)
        size += entry_size
        if size > size_max:
            pieces.append(b"".join(parts))
            parts = []
            size = entry_size
        if is_large:
            pieces.append(b"".join((*parts, opening)))
            pieces += _large_pieces(data)
            parts = [keys]
            size = len(keys)
        else:
            parts += (opening, encoded, keys)
        opening = b',{"Data":"'
    parts.append(after)
    pieces.append(b"".join(parts))
    return pieces


def _large_pieces(data: bytes) -> list[bytes]:
    with memoryview(data) as view:
        return [b64encode(view[start : start + _SLICE_BYTES]) for start in range(0, len(data), _SLICE_BYTES)]


def _keys(entry: PutRecordsEntry) -> bytes:
    """From the end of the base64 to the entry's brace."""
    try:
        if entry.explicit_hash_key is None:
            return b'","PartitionKey":%b}' % _encode_text(entry.partition_key)
        return b'","PartitionKey":%b,"ExplicitHashKey":%b}' % (
            _encode_text(entry.partition_key),
            _encode_text(entry.explicit_hash_key),
        )
    except UnicodeEncodeError as error:
        raise CodecError(f"a partition key that is not Unicode cannot be sent: {error}") from None


def decode_put_record(body: Buffer, *, request_id: str | None = None) -> PutRecordResponse:
    answer = _PUT_RECORD.decode(body)
    return PutRecordResponse(answer.shard_id, answer.sequence_number, request_id)


def decode_put_records(body: Buffer, *, request_id: str | None = None) -> PutRecordsResponse:
    """Entries stand in the order of the request's. Whether there are as many is for the caller, who knows."""
    answer = _PUT_RECORDS.decode(body)
    failed_record_count = answer.failed_record_count
    if failed_record_count is None:
        failed_record_count = sum(entry.error_code is not None for entry in answer.records)
    return PutRecordsResponse(answer.records, failed_record_count, request_id)
