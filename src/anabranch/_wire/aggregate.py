"""The KPL's aggregated records, both ways: many small records as the data of one.

    F3 89 9A C2 | protobuf message | MD5 of the message (16 bytes)

    message   0A len partition_key ... | 12 len explicit_hash_key ... | 1A len record ...
    record    08 key_index [10 hash_key_index] 1A len data [22 len tag]...
    tag       0A len key [12 len value]

Writing. Both tables hold each text once, in the order of first use; the second holds only explicit hash keys that
writers gave. The bytes are the same as those of the KPL. `AggregateBuilder.size` is always exact, so nothing is packed
twice. This module does not know shards or service limits.

Reading. A record is an aggregate if it starts with the magic number, has more than a digest after it, the MD5 matches,
and the message is valid: well-formed, at least one record, every index inside its table, every text UTF-8, every
explicit hash key a hash key. Anything else is an ordinary record and is passed on unchanged. Only one level is opened:
data that is itself an aggregate stays data. Three cases differ from KCL, which would silently lose records:

- an index outside its table (KCL keeps the sub-records before it and drops the rest): passed on whole, unchanged;
- no record in the message (KCL delivers nothing): passed on unchanged;
- a sub-record in the wrong shard (KCL drops the whole aggregate): `misrouted` names them, and the reader decides.

An absent explicit hash key index is absent, never index 0. Tables may follow the records that use them.

Parsing checks the whole message and keeps twelve bytes for each sub-record; sub-records are built on demand. So a full
aggregate of 170,000 empty records does not take 50 MB before the first one is handled.
"""

import hashlib
import re
from array import array
from collections.abc import Sequence
from typing import Final, NamedTuple, TypeAlias

from anabranch._model.hash_keys import HashKeyRange, md5
from anabranch.errors import CodecError
from anabranch.limits import HASH_KEY_MAX

# A field starts with its tag: number << 3 | wire type.
_VARINT: Final = 0
_FIXED64: Final = 1
_LENGTH_DELIMITED: Final = 2
_START_GROUP: Final = 3
_END_GROUP: Final = 4
_FIXED32: Final = 5

_VARINT_BYTES_MAX: Final = 10  # 64 bits
_SHORT_VARINT_BYTES_MAX: Final = 5  # 32 bits: tags and lengths
_TAG_MIN: Final = 1 << 3  # field numbers start at 1
_TAG_MAX: Final = (1 << 32) - 1
_GROUP_DEPTH_MAX: Final = 100  # the limit of protobuf's own parsers

MAGIC: Final = b"\xf3\x89\x9a\xc2"
DIGEST_BYTES: Final = 16
AGGREGATE_OVERHEAD_BYTES: Final = len(MAGIC) + DIGEST_BYTES

# A field's head is its tag and a varint: its value, or the length of what follows. Encoding heads is half the work of
# writing small records, so the heads of small numbers are precomputed.
_READY: Final = 1280

SubRecord: TypeAlias = tuple[str, str | None, bytes]
"""Partition key, explicit hash key, data. The sub-sequence number is the index in the aggregate, from 0."""

_MESSAGE_START: Final = len(MAGIC)
_HASH_KEY_DIGITS_MAX: Final = len(str(HASH_KEY_MAX))
_HASH_KEY_BYTES: Final = 16

# Tags of known fields: number << 3 | wire type. A known number with another wire type is an unknown field.
_KEY: Final = 0x0A
_HASH_KEY: Final = 0x12
_RECORD: Final = 0x1A
_KEY_INDEX: Final = 0x08
_HASH_KEY_INDEX: Final = 0x10
_DATA: Final = 0x1A
_TAG: Final = 0x22
_TAG_KEY: Final = 0x0A
_TAG_VALUE: Final = 0x12


# Protobuf. Readers take the buffer, a position and the end of the enclosing message, and never look past that end.


def encode_varint(number: int) -> bytes:
    if number < 0x80:
        return bytes((number,))
    if number < 0x4000:
        return bytes((number & 0x7F | 0x80, number >> 7))
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)
    return bytes(out)


def read_varint(data: bytes, position: int, end: int, bytes_max: int = _VARINT_BYTES_MAX) -> tuple[int, int]:
    """An unsigned number of at most 64 bits. Overlong encodings are legal; bits above the 64th are dropped."""
    number = shift = 0
    for at in range(position, min(end, position + bytes_max)):
        byte = data[at]
        number |= (byte & 0x7F) << shift
        if byte < 0x80:
            return number & 0xFFFF_FFFF_FFFF_FFFF, at + 1
        shift += 7
    raise CodecError(f"the number at byte {position} is too long or cut off")


def read_tag(data: bytes, position: int, end: int) -> tuple[int, int]:
    tag, after = read_varint(data, position, end, _SHORT_VARINT_BYTES_MAX)
    if not _TAG_MIN <= tag <= _TAG_MAX:
        raise CodecError(f"the field at byte {position} has the invalid tag {tag}")
    return tag, after


def read_length(data: bytes, position: int, end: int) -> tuple[int, int]:
    """Where a length-delimited field's content starts and stops."""
    length, start = read_varint(data, position, end, _SHORT_VARINT_BYTES_MAX)
    if length > end - start:
        raise CodecError(f"the field at byte {position} claims {length} bytes, but {end - start} are left")
    return start, start + length


def skip_field(data: bytes, tag: int, position: int, end: int) -> int:
    """The position after an unknown field. Its tag has already been read."""
    groups: list[int] = []
    while True:
        wire_type = tag & 7
        if wire_type == _VARINT:
            _, position = read_varint(data, position, end)
        elif wire_type == _LENGTH_DELIMITED:
            _, position = read_length(data, position, end)
        elif wire_type == _FIXED64:
            position += 8
        elif wire_type == _FIXED32:
            position += 4
        elif wire_type == _START_GROUP and len(groups) < _GROUP_DEPTH_MAX:
            groups.append(tag >> 3)
        elif wire_type == _END_GROUP and groups and groups[-1] == tag >> 3:
            groups.pop()
        else:
            raise CodecError(f"the field before byte {position} has the invalid tag {tag}")
        if position > end:
            raise CodecError(f"the message ends inside the field before byte {position}")
        if not groups:
            return position
        tag, position = read_tag(data, position, end)


# Writing


def _head(tag: int, number: int) -> bytes:
    return bytes((tag,)) + encode_varint(number)


_KEY_HEADS: Final = [_head(_KEY, length) for length in range(_READY)]
_KEY_INDEXES: Final = [_head(_KEY_INDEX, index) for index in range(_READY)]
_HEADS: Final = [_head(_RECORD, length) for length in range(_READY)]  # also of _DATA, which has the same tag


class Tag(NamedTuple):
    """A key and a value attached to a record. All other readers of aggregates ignore it."""

    key: str
    value: str | None = None


PRODUCER_TAG: Final = Tag("ab")
"""Our producer tags the first record of its aggregates. It resends a whole aggregate if any of its records landed in
the wrong shard, so a reader can skip a tagged aggregate there as a whole (rule F6)."""


TRACE_TAG: Final = "traceparent"
"""A sub-record whose put was traced has this tag, with the W3C trace parent as its value (rule O1)."""
_TRACE_PARENT: Final = re.compile(r"00-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")


class AggregateBuilder:
    """One aggregate being filled. Keys are not checked here: the producer checks them when they are given."""

    __slots__ = ("_hash_key_indexes", "_hash_key_parts", "_key_indexes", "_key_parts", "_record_parts", "size")

    def __init__(self) -> None:
        self.size = AGGREGATE_OVERHEAD_BYTES
        """The length of what `finish` would return now."""
        self._key_indexes: dict[str, bytes] = {}
        self._hash_key_indexes: dict[str, bytes] = {}
        self._key_parts: list[bytes] = []
        self._hash_key_parts: list[bytes] = []
        self._record_parts: list[bytes] = []
        """Four for each record."""

    @property
    def count(self) -> int:
        return len(self._record_parts) // 4

    def add(
        self,
        partition_key: str,
        data: bytes,
        explicit_hash_key: str | None = None,
        tags: Sequence[Tag] = (),
        size_max: int = 1 << 62,
    ) -> bool:
        """Appends the record unless `size` would exceed `size_max`; returns whether it did.

        The record's sub-sequence number is the value of `count` before the call.
        """
        if explicit_hash_key is not None or tags:
            return self._add_with_extras(partition_key, data, explicit_hash_key, tags, size_max)
        # The hot path: as `_add_with_extras`, for a record with only a key and data.
        keys = self._key_indexes
        length = len(data)
        data_head = _HEADS[length] if length < _READY else _head(_DATA, length)
        if partition_key in keys:
            key_index = keys[partition_key]
            length += len(key_index) + len(data_head)
            record_head = _HEADS[length] if length < _READY else _head(_RECORD, length)
            size = self.size + len(record_head) + length
            if size > size_max:
                return False
        else:
            index = len(keys)
            key_index = _KEY_INDEXES[index] if index < _READY else _head(_KEY_INDEX, index)
            length += len(key_index) + len(data_head)
            record_head = _HEADS[length] if length < _READY else _head(_RECORD, length)
            key = partition_key.encode()
            key_length = len(key)
            key_head = _KEY_HEADS[key_length] if key_length < _READY else _head(_KEY, key_length)
            size = self.size + len(record_head) + length + len(key_head) + key_length
            if size > size_max:
                return False
            keys[partition_key] = key_index
            self._key_parts += (key_head, key)
        parts = self._record_parts
        parts += (record_head, key_index, data_head, data)
        self.size = size
        return True

    def finish(self) -> bytes:
        assert self.count > 0, "an aggregate needs at least one record"
        message = b"".join(self._key_parts + self._hash_key_parts + self._record_parts)
        return b"%b%b%b" % (MAGIC, message, hashlib.md5(message, usedforsecurity=False).digest())

    def _add_with_extras(
        self, partition_key: str, data: bytes, explicit_hash_key: str | None, tags: Sequence[Tag], size_max: int
    ) -> bool:
        key_part = hash_key_part = hash_key_index = b""
        key_index = self._key_indexes.get(partition_key)
        if key_index is None:
            key_index = _head(_KEY_INDEX, len(self._key_indexes))
            key_part = _encode_text(_KEY, partition_key)
        if explicit_hash_key is not None:
            hash_key_index = self._hash_key_indexes.get(explicit_hash_key, b"")
            if not hash_key_index:
                hash_key_index = _head(_HASH_KEY_INDEX, len(self._hash_key_indexes))
                hash_key_part = _encode_text(_HASH_KEY, explicit_hash_key)
        record = (key_index + hash_key_index + _head(_DATA, len(data)), data, _encode_tags(tags))
        record_head = _head(_RECORD, sum(map(len, record)))
        size = self.size + sum(map(len, (key_part, hash_key_part, record_head, *record)))
        if size > size_max:
            return False
        if key_part:
            self._key_indexes[partition_key] = key_index
            self._key_parts.append(key_part)
        if explicit_hash_key is not None and hash_key_part:
            self._hash_key_indexes[explicit_hash_key] = hash_key_index
            self._hash_key_parts.append(hash_key_part)
        self._record_parts += (record_head, *record)
        self.size = size
        return True


def _encode_text(tag: int, text: str) -> bytes:
    encoded = text.encode()
    return _head(tag, len(encoded)) + encoded


def _encode_tags(tags: Sequence[Tag]) -> bytes:
    out = b""
    for key, value in tags:
        content = _encode_text(_TAG_KEY, key) + (b"" if value is None else _encode_text(_TAG_VALUE, value))
        out += _head(_TAG, len(content)) + content
    return out


# Reading


def open_aggregate(data: bytes) -> "Aggregate | None":
    """The aggregate in `data`, or None if it is an ordinary record. Never raises."""
    if not data.startswith(MAGIC):
        return None
    try:
        return parse_aggregate(data)
    except CodecError:
        return None


def parse_aggregate(data: bytes) -> "Aggregate":
    """Like `open_aggregate`, but raises a `CodecError` that says why `data` is not a valid aggregate."""
    end = len(data) - DIGEST_BYTES
    if not data.startswith(MAGIC) or end <= _MESSAGE_START:
        raise CodecError("not an aggregate: no magic number, or no message before the digest")
    message = memoryview(data)[_MESSAGE_START:end]
    if hashlib.md5(message, usedforsecurity=False).digest() != data[end:]:
        raise CodecError("not an aggregate: the MD5 digest does not match the message")
    aggregate = Aggregate(data)
    try:
        aggregate._scan()  # noqa: SLF001 -- an unchecked Aggregate is never visible outside
    except UnicodeDecodeError:
        raise CodecError("not an aggregate: a text is not UTF-8") from None
    return aggregate


class Aggregate:
    """A valid aggregate. `len()` is the number of its sub-records."""

    __slots__ = (
        "_bytes", "_hash_key_indexes", "_key_indexes", "_starts", "_stops",
        "explicit_hash_keys", "first_tags", "partition_keys", "trace_parents",
    )  # fmt: skip

    def __init__(self, data: bytes) -> None:
        self.partition_keys: list[str] = []
        """The table, in the writer's order. Some entries may be unused."""
        self.explicit_hash_keys: list[str] = []
        """The table, without leading zeros."""
        self.first_tags: tuple[Tag, ...] = ()
        """The tags of the first sub-record, where writers mark an aggregate."""
        self.trace_parents: dict[int, str] = {}
        """By sub-record; few have one."""
        self._bytes = data
        self._key_indexes = array("I")
        self._hash_key_indexes: dict[int, int] = {}
        self._starts = array("I")
        self._stops = array("I")

    def __len__(self) -> int:
        return len(self._starts)

    def sub_records(self, first: int = 0, last: int | None = None) -> list[SubRecord]:
        """The sub-records from `first` up to but not including `last`, built by each call."""
        data, keys = self._bytes, self.partition_keys
        wanted = slice(first, last)
        places = zip(self._key_indexes[wanted], self._starts[wanted], self._stops[wanted], strict=True)
        if not self._hash_key_indexes:
            return [(keys[key], None, data[start:stop]) for key, start, stop in places]
        hash_keys, hash_key_of = self.explicit_hash_keys, self._hash_key_indexes.get
        return [
            (keys[key], None if (index := hash_key_of(number)) is None else hash_keys[index], data[start:stop])
            for number, (key, start, stop) in enumerate(places, first)
        ]

    def misrouted(self, shard: HashKeyRange) -> list[int]:
        """The indexes of the sub-records whose hash key is outside the range of their shard."""
        low, high = shard.start.to_bytes(_HASH_KEY_BYTES), shard.end.to_bytes(_HASH_KEY_BYTES)
        # `md5_digest`, inlined for speed: this is done for every key of every aggregate.
        keys_outside = [not low <= md5(key.encode()).digest() <= high for key in self.partition_keys]
        hash_keys_outside = [int(hash_key) not in shard for hash_key in self.explicit_hash_keys]
        if not any(keys_outside) and not any(hash_keys_outside):
            return []
        hash_key_of = self._hash_key_indexes.get
        return [
            number
            for number, key in enumerate(self._key_indexes)
            if (keys_outside[key] if (index := hash_key_of(number)) is None else hash_keys_outside[index])
        ]

    def _scan(self) -> None:
        """Checks the message; records its tables and the positions of its sub-records."""
        data = self._bytes
        end = len(data) - DIGEST_BYTES
        add_key, add_key_index = self.partition_keys.append, self._key_indexes.append
        add_start, add_stop = self._starts.append, self._stops.append
        position = _MESSAGE_START
        # The fields that nearly all writers use (texts, and records of a key index and data, with numbers of one or two
        # bytes) are read here without a call. This may look at bytes after a field's end, at most into the digest, but
        # accepts a field only if its lengths fit.
        while position < end:
            tag = data[position]
            length = data[position + 1]
            start = position + 2
            if length > 0x7F:
                length += (data[start] << 7) - 0x80
                start += 1
                if length > 0x3FFF:  # the number has more bytes
                    position = self._scan_field(position, end)
                    continue
            stop = start + length
            if stop <= end:
                if tag == _RECORD:
                    key_index = data[start + 1]
                    at = start + 2
                    if key_index > 0x7F and data[at] < 0x80:
                        key_index += (data[at] << 7) - 0x80
                        at += 1
                    data_length = data[at + 1]
                    data_start = at + 2
                    if data_length > 0x7F:
                        data_length += (data[data_start] << 7) - 0x80
                        data_start += 1
                    if data_start + data_length == stop and data[at] == _DATA and data[start] == _KEY_INDEX:
                        add_key_index(key_index)
                        add_start(data_start)
                        add_stop(stop)
                        position = stop
                        continue
                elif tag == _KEY:
                    add_key(data[start:stop].decode())
                    position = stop
                    continue
            position = self._scan_field(position, end)
        self._check_indexes()

    def _scan_field(self, position: int, end: int) -> int:
        """Any field of the message, in any encoding; returns where the next one starts."""
        data = self._bytes
        tag, position = read_tag(data, position, end)
        if tag not in {_KEY, _HASH_KEY, _RECORD}:
            return skip_field(data, tag, position, end)
        start, stop = read_length(data, position, end)
        if tag == _KEY:
            self.partition_keys.append(data[start:stop].decode())
        elif tag == _HASH_KEY:
            self.explicit_hash_keys.append(_read_hash_key(data, start, stop))
        else:
            self._scan_record(start, stop)
        return stop

    def _scan_record(self, position: int, end: int) -> None:
        """Any record, in any encoding. If a field is repeated, the last one counts, as in protobuf."""
        data = self._bytes
        number = len(self._starts)
        key_index = data_start = data_stop = -1
        tags: list[Tag] = []
        while position < end:
            tag, position = read_tag(data, position, end)
            if tag == _KEY_INDEX:
                key_index, position = read_varint(data, position, end)
            elif tag == _HASH_KEY_INDEX:
                self._hash_key_indexes[number], position = read_varint(data, position, end)
            elif tag == _DATA:
                data_start, position = read_length(data, position, end)
                data_stop = position
            elif tag == _TAG:
                start, position = read_length(data, position, end)
                tags.append(_read_tag(data, start, position))
            else:
                position = skip_field(data, tag, position, end)
        if key_index < 0 or data_start < 0:
            raise CodecError(f"sub-record {number} has no partition key index or no data")
        if key_index > len(data):
            raise CodecError(f"sub-record {number} refers to partition key {key_index}, which is outside the table")
        self._key_indexes.append(key_index)
        self._starts.append(data_start)
        self._stops.append(data_stop)
        if number == 0:
            self.first_tags = tuple(tags)
        for key, value in tags:
            if key == TRACE_TAG and value is not None and _TRACE_PARENT.fullmatch(value):
                self.trace_parents[number] = value

    def _check_indexes(self) -> None:
        if not self._starts:
            raise CodecError("the message has no records")
        for indexes, table in (
            (self._key_indexes, self.partition_keys),
            (self._hash_key_indexes.values(), self.explicit_hash_keys),
        ):
            highest = max(indexes, default=-1)
            if highest >= len(table):
                raise CodecError(f"a sub-record refers to key {highest} of a table of {len(table)}")


def _read_hash_key(data: bytes, start: int, stop: int) -> str:
    """Without leading zeros: some writers emit them, but the service and the rest of this library reject them."""
    digits = data[start:stop]
    text = (digits.lstrip(b"0") or b"0").decode("latin-1")
    if not digits.isdigit() or len(text) > _HASH_KEY_DIGITS_MAX or int(text) > HASH_KEY_MAX:
        raise CodecError(f"the explicit hash key at byte {start} is not a number from 0 to 2**128 - 1")
    return text


def _read_tag(data: bytes, position: int, end: int) -> Tag:
    key = value = None
    while position < end:
        tag, position = read_tag(data, position, end)
        if tag in {_TAG_KEY, _TAG_VALUE}:
            start, position = read_length(data, position, end)
            text = data[start:position].decode()
            key, value = (text, value) if tag == _TAG_KEY else (key, text)
        else:
            position = skip_field(data, tag, position, end)
    if key is None:
        raise CodecError(f"the tag before byte {end} has no key")
    return Tag(key, value)
