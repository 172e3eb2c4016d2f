"""The JSON bodies of the Kinesis calls that the client makes: requests, answers, pushed events and errors.

A request is encoded as a list of pieces, so that a large one is hashed and written without being joined. Answers are
decoded into structs that carry AWS's member names. A body may be any buffer: nothing refers to it afterwards.
"""

import html
import re
from collections.abc import Callable, Sequence
from typing import Any, Final, Generic, TypeVar

import msgspec
from pybase64 import b64decode, b64encode

from anabranch._model.hash_keys import HashKeyRange, parse_hash_key
from anabranch._model.streams import Shard, ShardFilter, StartingPosition, StreamName, parse_sequence_number
from anabranch._wire.event_stream import Message
from anabranch._wire.messages import (
    ChildShard,
    ConsumerDescription,
    GetRecordsResponse,
    KinesisRecord,
    ListShardsResponse,
    ListStreamConsumersResponse,
    PutRecordsEntry,
    PutRecordsResponse,
    PutRecordsResultEntry,
    StreamSummary,
    SubscribeToShardEvent,
)
from anabranch.errors import CodecError

JSON: Final = "application/x-amz-json-1.1"

Buffer = bytes | bytearray | memoryview
W = TypeVar("W")

_encode_json: Final = msgspec.json.Encoder().encode

_SAMPLE_BYTES: Final = 16 << 10
_LARGE_RECORD_BYTES: Final = 800  # of JSON per record: both ways cost the same here (payloads of about 450 bytes)

R = TypeVar("R")

PIECE_BYTES_MAX: Final = 64 << 10
_SLICE_BYTES: Final = PIECE_BYTES_MAX // 4 * 3  # fills a piece in base64, a multiple of three bytes
_WHOLE_BYTES_MAX: Final = _SLICE_BYTES // 2  # fits into one piece together with its keys

_BODY_BYTES_MAX: Final = 64 << 10
_CODE_CHARACTERS_MAX: Final = 128
_MESSAGE_CHARACTERS_MAX: Final = 2048

_XML_CODE: Final = re.compile(r"<Code>([^<]*)</Code>")
_XML_MESSAGE: Final = re.compile(r"<[Mm]essage>([^<]*)</[Mm]essage>")
_HTML_TITLE: Final = re.compile(r"<title>([^<]*)</title>", re.IGNORECASE)


def encode_request(members: dict[str, Any]) -> list[bytes]:
    """One piece. Members that are None are left out."""
    try:
        return [_encode_json(_without_none(members))]
    except UnicodeEncodeError as error:
        raise CodecError(f"the request contains text that is not valid Unicode: {error}") from None


def _without_none(members: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in members.items() if value is not None}


def stream_members(stream: StreamName) -> dict[str, str]:
    """The ARN if it is known: only an ARN can name a stream of another account."""
    return {"StreamName": stream.name} if stream.arn is None else {"StreamARN": stream.arn}


def answer_decoder(operation: str, shape: type[W]) -> Callable[[Buffer], W]:
    """Decodes one operation's answers into `shape`, whose field names on the wire are AWS's."""
    decode_json = msgspec.json.Decoder(shape).decode

    def decode(body: Buffer) -> W:
        try:
            return decode_json(body)
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:  # bad UTF-8 is a ValueError
            raise CodecError(f"the answer to {operation} ({len(body)} bytes) is not valid: {error}") from None

    return decode


# ListShards


class _HashKeyRange(msgspec.Struct, rename="pascal"):
    starting_hash_key: str
    ending_hash_key: str

    def value(self) -> HashKeyRange:
        start, end = parse_hash_key(self.starting_hash_key), parse_hash_key(self.ending_hash_key)
        if start > end:
            raise ValueError(f"the hash key range ends at {end}, before its start at {start}")
        return HashKeyRange(start, end)


class _SequenceNumberRange(msgspec.Struct, rename="pascal"):
    starting_sequence_number: str
    ending_sequence_number: str | None = None


class WireChildShard(msgspec.Struct, rename="pascal"):
    """A child, as the last read of a closed shard describes it."""

    shard_id: str
    parent_shards: list[str]
    hash_key_range: _HashKeyRange

    def value(self, operation: str) -> ChildShard:
        try:
            return ChildShard(self.shard_id, tuple(self.parent_shards), self.hash_key_range.value())
        except ValueError as error:
            raise CodecError(f"{operation} returned an invalid child shard {self.shard_id}: {error}") from None


class _Shard(msgspec.Struct, rename="pascal"):
    shard_id: str
    hash_key_range: _HashKeyRange
    sequence_number_range: _SequenceNumberRange
    parent_shard_id: str | None = None
    adjacent_parent_shard_id: str | None = None

    def value(self) -> Shard:
        numbers = self.sequence_number_range
        ending = numbers.ending_sequence_number
        try:
            return Shard(
                shard_id=self.shard_id,
                hash_key_range=self.hash_key_range.value(),
                starting_sequence_number=parse_sequence_number(numbers.starting_sequence_number),
                ending_sequence_number=None if ending is None else parse_sequence_number(ending),
                parent_shard_id=self.parent_shard_id,
                adjacent_parent_shard_id=self.adjacent_parent_shard_id,
            )
        except ValueError as error:
            raise CodecError(f"ListShards returned an invalid shard {self.shard_id}: {error}") from None


class _ListShards(msgspec.Struct, rename="pascal"):
    shards: list[_Shard] = []
    next_token: str | None = None


_decode_list_shards: Final = answer_decoder("ListShards", _ListShards)


def encode_list_shards(
    stream: StreamName,
    *,
    shard_filter: ShardFilter | None = None,
    next_token: str | None = None,
    max_results: int | None = None,
) -> list[bytes]:
    """A token replaces the stream's name and the filter: the service rejects requests that have both."""
    if next_token is not None:
        return encode_request({"StreamARN": stream.arn, "NextToken": next_token, "MaxResults": max_results})
    members: dict[str, object] = {**stream_members(stream), "MaxResults": max_results}
    if shard_filter is not None:
        filter_members = {"Type": shard_filter.type, "Timestamp": shard_filter.timestamp_seconds}
        members["ShardFilter"] = _without_none(filter_members)
    return encode_request(members)


def decode_list_shards(body: Buffer) -> ListShardsResponse:
    answer = _decode_list_shards(body)
    return ListShardsResponse(tuple(shard.value() for shard in answer.shards), answer.next_token)


# GetShardIterator, GetRecords and SubscribeToShard


class _TextRecord(msgspec.Struct, gc=False, frozen=True):
    """`KinesisRecord` with its payload still in base64."""

    data: str = msgspec.field(name="Data")
    sequence_number: str = msgspec.field(name="SequenceNumber")
    partition_key: str = msgspec.field(name="PartitionKey", default="")
    arrival_seconds: float = msgspec.field(name="ApproximateArrivalTimestamp", default=0.0)


class _Records(msgspec.Struct, Generic[R], rename="pascal"):
    """The answer to GetRecords or an event of SubscribeToShard: only the member that says where to continue differs."""

    records: list[R]
    next_shard_iterator: str | None = None
    continuation_sequence_number: str | None = None
    millis_behind_latest: int | None = None
    child_shards: list[WireChildShard] | None = None


class _ShardIterator(msgspec.Struct, rename="pascal"):
    shard_iterator: str


class _RecordsDecoder:
    """Decodes lists of records in one of two ways: small payloads with msgspec's base64, large ones as text that
    pybase64 decodes several times faster. Both ways are equally strict and give equal values.
    """

    __slots__ = ("_decode_large", "_decode_small", "_operation")

    def __init__(self, operation: str) -> None:
        self._operation = operation
        self._decode_small = answer_decoder(operation, _Records[KinesisRecord])
        self._decode_large = answer_decoder(operation, _Records[_TextRecord])

    def decode(self, body: Buffer) -> tuple[list[KinesisRecord], _Records[Any], tuple[ChildShard, ...]]:
        """The records, the other members of the answer, and its child shards."""
        answer: _Records[Any]
        if _holds_large_records(body):
            answer = self._decode_large(body)
            records = self._from_text(answer.records)
        else:
            answer = self._decode_small(body)
            records = answer.records
        children = answer.child_shards
        return records, answer, tuple(child.value(self._operation) for child in children) if children else ()

    def _from_text(self, records: list[_TextRecord]) -> list[KinesisRecord]:
        try:
            return [
                KinesisRecord(
                    data=b64decode(record.data, None, True),
                    partition_key=record.partition_key,
                    sequence_number=record.sequence_number,
                    arrival_seconds=record.arrival_seconds,
                )
                for record in records
            ]
        except ValueError as error:
            raise CodecError(f"{self._operation} returned a payload that is not valid base64: {error}") from None


def _holds_large_records(body: Buffer) -> bool:
    """An estimate from the first bytes. A wrong one costs time, never correctness."""
    sample = bytes(body[:_SAMPLE_BYTES])
    return len(sample) > _LARGE_RECORD_BYTES * max(1, sample.count(b'"Data"'))


_decode_shard_iterator: Final = answer_decoder("GetShardIterator", _ShardIterator)
_decode_records: Final = _RecordsDecoder("GetRecords").decode
_decode_event: Final = _RecordsDecoder("SubscribeToShard").decode


def encode_get_shard_iterator(stream: StreamName, shard_id: str, position: StartingPosition) -> list[bytes]:
    return encode_request(
        stream_members(stream)
        | {
            "ShardId": shard_id,
            "ShardIteratorType": position.type,
            "StartingSequenceNumber": position.sequence_number,
            "Timestamp": position.timestamp_seconds,
        }
    )


def decode_get_shard_iterator(body: Buffer) -> str:
    return _decode_shard_iterator(body).shard_iterator


def encode_get_records(stream: StreamName, shard_iterator: str, *, limit: int | None = None) -> list[bytes]:
    """The iterator already names the stream; the ARN is added if it is known."""
    return encode_request({"StreamARN": stream.arn, "ShardIterator": shard_iterator, "Limit": limit})


def decode_get_records(body: Buffer, *, server_seconds: float | None = None) -> GetRecordsResponse:
    records, answer, children = _decode_records(body)
    return GetRecordsResponse(
        records=records,
        next_shard_iterator=answer.next_shard_iterator,
        millis_behind_latest=answer.millis_behind_latest,
        child_shards=children,
        server_seconds=server_seconds,
    )


def encode_subscribe_to_shard(consumer_arn: str, shard_id: str, position: StartingPosition) -> list[bytes]:
    start = {
        "Type": position.type,
        "SequenceNumber": position.sequence_number,
        "Timestamp": position.timestamp_seconds,
    }
    return encode_request({"ConsumerARN": consumer_arn, "ShardId": shard_id, "StartingPosition": _without_none(start)})


def decode_subscribe_to_shard_event(payload: Buffer) -> SubscribeToShardEvent:
    records, event, children = _decode_event(payload)
    return SubscribeToShardEvent(
        records=records,
        continuation_sequence_number=event.continuation_sequence_number,
        millis_behind_latest=event.millis_behind_latest,
        child_shards=children,
    )


# PutRecords


class _PutRecords(msgspec.Struct, rename="pascal"):
    records: list[PutRecordsResultEntry]


_decode_put_records: Final = answer_decoder("PutRecords", _PutRecords)


def encode_put_records(stream: StreamName, entries: Sequence[PutRecordsEntry]) -> list[bytes]:
    start, end, opening = encode_request(stream_members(stream))[0][:-1] + b',"Records":[', b"]}", b'{"Data":"'
    pieces: list[bytes] = []
    parts = [start]
    size, size_max = len(start), PIECE_BYTES_MAX - len(end)
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
    pieces.append(b"".join((*parts, end)))
    return pieces


def _large_pieces(data: bytes) -> list[bytes]:
    with memoryview(data) as view:
        return [b64encode(view[start : start + _SLICE_BYTES]) for start in range(0, len(data), _SLICE_BYTES)]


def _keys(entry: PutRecordsEntry) -> bytes:
    """Everything after the base64, up to the closing brace."""
    plain = str.__str__  # msgspec refuses subclasses of str, and they may have a __str__ of their own
    try:
        if entry.explicit_hash_key is None:
            return b'","PartitionKey":%b}' % _encode_json(plain(entry.partition_key))
        return b'","PartitionKey":%b,"ExplicitHashKey":%b}' % (
            _encode_json(plain(entry.partition_key)),
            _encode_json(plain(entry.explicit_hash_key)),
        )
    except UnicodeEncodeError as error:
        raise CodecError(f"the partition key or hash key is not valid Unicode: {error}") from None


def decode_put_records(body: Buffer, *, request_id: str | None = None) -> PutRecordsResponse:
    """Entries are in the order of the request. The caller checks that their number matches."""
    return PutRecordsResponse(_decode_put_records(body).records, request_id)


# DescribeStreamSummary


class _DescribeStreamSummary(msgspec.Struct, rename="pascal"):
    stream_description_summary: StreamSummary


_decode_describe: Final = answer_decoder("DescribeStreamSummary", _DescribeStreamSummary)


def encode_describe_stream_summary(stream: StreamName) -> list[bytes]:
    return encode_request(stream_members(stream))


def decode_describe_stream_summary(body: Buffer, *, server_seconds: float | None = None) -> StreamSummary:
    summary = _decode_describe(body).stream_description_summary
    return msgspec.structs.replace(summary, server_seconds=server_seconds)


# Fan-out consumers


class _Registered(msgspec.Struct, rename="pascal"):
    consumer: ConsumerDescription


class _Described(msgspec.Struct, rename="pascal"):
    consumer_description: ConsumerDescription


_decode_registered: Final = answer_decoder("RegisterStreamConsumer", _Registered)
_decode_described: Final = answer_decoder("DescribeStreamConsumer", _Described)
decode_list_stream_consumers: Final = answer_decoder("ListStreamConsumers", ListStreamConsumersResponse)


def encode_stream_consumer(stream_arn: str, name: str) -> list[bytes]:
    """To register or describe it."""
    return encode_request({"StreamARN": stream_arn, "ConsumerName": name})


def decode_register_stream_consumer(body: Buffer) -> ConsumerDescription:
    return _decode_registered(body).consumer


def decode_describe_stream_consumer(body: Buffer) -> ConsumerDescription:
    return _decode_described(body).consumer_description


def encode_list_stream_consumers(stream_arn: str, *, next_token: str | None = None) -> list[bytes]:
    return encode_request({"StreamARN": stream_arn, "NextToken": next_token})


def encode_deregister_stream_consumer(consumer_arn: str) -> list[bytes]:
    """The answer has no body."""
    return encode_request({"ConsumerARN": consumer_arn})


# Errors


class AwsError(msgspec.Struct, frozen=True):
    code: str | None
    """Without its namespace. None if the answer has no code: then only the HTTP status tells."""
    message: str = ""


def decode_aws_error(body: Buffer, error_type: str | None = None) -> AwsError:
    """The code and the message of an error answer, in any form. Never raises.

    AWS services answer in JSON with `__type` and `message` (`Message` in a SerializationException). The code may follow
    a namespace (`com.amazonaws.kinesis.v20131202#Code`), or be in the header x-amzn-ErrorType before a colon
    (`error_type`); a code in the body wins. Load balancers and proxies answer in XML or HTML, or with nothing. The
    first byte of the body decides, because the content type of errors is often wrong.
    """
    text = bytes(body[:_BODY_BYTES_MAX]).lstrip()
    code: Any = None
    message: Any = ""
    if text.startswith(b"<"):
        code, message = _from_markup(text.decode("utf-8", "replace"))
    elif text:
        members = _members(text)
        code = members.get("__type") or members.get("code")
        message = members.get("message") or members.get("Message")
    return AwsError(
        _code(code) or _code(error_type), message[:_MESSAGE_CHARACTERS_MAX] if isinstance(message, str) else ""
    )


def _members(body: bytes) -> dict[str, Any]:
    try:
        value = msgspec.json.decode(body)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def _from_markup(text: str) -> tuple[str | None, str]:
    code = _XML_CODE.search(text)
    message = _XML_MESSAGE.search(text) or _HTML_TITLE.search(text)
    return None if code is None else code[1], "" if message is None else html.unescape(message[1]).strip()


def _code(value: Any) -> str | None:
    """`Code` of `namespace#Code:http://...`."""
    if not isinstance(value, str):
        return None
    return value.partition(":")[0].rpartition("#")[2].strip()[:_CODE_CHARACTERS_MAX] or None


# The messages of a SubscribeToShard stream


def decode_subscription_message(message: Message) -> SubscribeToShardEvent | AwsError | None:
    """An event, an error that ends the stream, or None for a message that carries neither.

    The first message only confirms the subscription. Unknown kinds of events are ignored, as the protocol requires, so
    that the service can add some.
    """
    headers = message.headers
    kind = headers.get(":message-type")
    if kind == "event":
        if headers.get(":event-type") != "SubscribeToShardEvent":
            return None
        return decode_subscribe_to_shard_event(message.payload)
    if kind == "exception":
        return decode_aws_error(message.payload, headers.get(":exception-type"))
    if kind == "error":
        return AwsError(headers.get(":error-code"), headers.get(":error-message", ""))
    raise CodecError(f"SubscribeToShard sent a message of unknown type {kind!r}")
