"""Reading the KPL's aggregated records (their layout is drawn in `aggregate.py`).

A record is an aggregate if it starts with the magic number, more than the digest follows, the MD5 fits, and the message
is whole: well-formed, with at least one record, every index inside its table, every text UTF-8, every explicit hash key
a hash key. Anything else is a record like any other and is passed on as it is. One level is opened: data that is an
aggregate again stays data.

Three cases are decided differently from KCL, which would lose records in them without an error:

- an index outside its table (KCL keeps the sub-records before it and drops the others): passed on whole, as it is;
- no record in the message (KCL delivers nothing): passed on as it is;
- a sub-record in the wrong shard (KCL drops the whole aggregate): `misrouted` names them, and the reader decides.

An absent explicit hash key index is absent, never index 0. Tables may follow the records that use them.

Parsing judges the whole message and notes where each sub-record lies, in twelve bytes each; sub-records are made when
they are asked for, so that a full aggregate of 170,000 empty records does not cost 50 MB before the first is handled.
"""

import hashlib
from array import array
from typing import Final, TypeAlias

from anabranch._model.hash_keys import HashKeyRange, md5_digest
from anabranch._wire.aggregate import DIGEST_BYTES, MAGIC, Tag
from anabranch._wire.protobuf import read_length, read_tag, read_varint, skip_field
from anabranch.errors import CodecError
from anabranch.limits import HASH_KEY_MAX

__all__ = ["Aggregate", "SubRecord", "open_aggregate", "parse_aggregate"]

SubRecord: TypeAlias = tuple[str, str | None, bytes]
"""Partition key, explicit hash key, data. The sub-sequence number is the place in the aggregate, from 0."""

_MESSAGE_START: Final = len(MAGIC)
_HASH_KEY_DIGITS_MAX: Final = len(str(HASH_KEY_MAX))
_HASH_KEY_BYTES: Final = 16

# Tags of known fields: number << 3 | wire type. A known number with another wire type is an unknown field.
_KEY, _HASH_KEY, _RECORD = 0x0A, 0x12, 0x1A
_KEY_INDEX, _HASH_KEY_INDEX, _DATA, _TAG = 0x08, 0x10, 0x1A, 0x22
_TAG_KEY, _TAG_VALUE = 0x0A, 0x12


def open_aggregate(data: bytes) -> "Aggregate | None":
    """The aggregate that these bytes are, or None: then the record is to be passed on as it is. Never raises."""
    if not data.startswith(MAGIC):
        return None
    try:
        return parse_aggregate(data)
    except CodecError:
        return None


def parse_aggregate(data: bytes) -> "Aggregate":
    """As `open_aggregate`, but a `CodecError` says why these bytes are no valid aggregate."""
    end = len(data) - DIGEST_BYTES
    if not data.startswith(MAGIC) or end <= _MESSAGE_START:
        raise CodecError("no aggregate: it has no magic number, or nothing between that and the digest")
    message = memoryview(data)[_MESSAGE_START:end]
    if hashlib.md5(message, usedforsecurity=False).digest() != data[end:]:
        raise CodecError("no aggregate: the MD5 at its end is not that of its message")
    aggregate = Aggregate(data)
    try:
        aggregate._scan()  # noqa: SLF001 -- an Aggregate that was not judged is never seen outside
    except UnicodeDecodeError:
        raise CodecError("no aggregate: one of its texts is not UTF-8") from None
    return aggregate


class Aggregate:
    """A valid aggregate. `len()` is the number of its sub-records."""

    __slots__ = (
        "_bytes", "_hash_key_indexes", "_key_indexes", "_starts", "_stops",
        "explicit_hash_keys", "first_tags", "partition_keys",
    )  # fmt: skip

    def __init__(self, data: bytes) -> None:
        self.partition_keys: list[str] = []
        """The table, in the writer's order; some may be unused."""
        self.explicit_hash_keys: list[str] = []
        """The table, without leading zeros."""
        self.first_tags: tuple[Tag, ...] = ()
        """The tags of the first sub-record, where writers mark an aggregate."""
        self._bytes = data
        self._key_indexes = array("I")
        self._hash_key_indexes: dict[int, int] = {}
        self._starts = array("I")
        self._stops = array("I")

    def __len__(self) -> int:
        return len(self._starts)

    def sub_records(self, first: int = 0, last: int | None = None) -> list[SubRecord]:
        """Those from `first` up to, not including, `last`; slices of the aggregate, made anew by each call."""
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
        """The places of the sub-records whose hash key lies outside the range of their shard."""
        low, high = shard.start.to_bytes(_HASH_KEY_BYTES), shard.end.to_bytes(_HASH_KEY_BYTES)
        keys_outside = [not low <= md5_digest(key) <= high for key in self.partition_keys]
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
        """Judges the message and notes its tables and the places of its sub-records."""
        data = self._bytes
        end = len(data) - DIGEST_BYTES
        add_key, add_key_index = self.partition_keys.append, self._key_indexes.append
        add_start, add_stop = self._starts.append, self._stops.append
        position = _MESSAGE_START
        # What every writer writes (texts, and records of a key index and data, with numbers of one or two bytes) is
        # read here without a call. Bytes past a field's end may be looked at, the digest's at the worst, but a field is
        # taken only if its lengths fit.
        while position < end:
            tag = data[position]
            length = data[position + 1]
            start = position + 2
            if length > 0x7F:
                length += (data[start] << 7) - 0x80
                start += 1
                if length > 0x3FFF:  # that number goes on
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
        """Any field of the message, however it is written; returns where the next one starts."""
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
        """Any record, however it is written. Where a field is repeated the last one counts, as protobuf has it."""
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
            raise CodecError(f"sub-record {number} refers to partition key {key_index}; no table is that long")
        self._key_indexes.append(key_index)
        self._starts.append(data_start)
        self._stops.append(data_stop)
        if number == 0:
            self.first_tags = tuple(tags)

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
    """Without leading zeros: some writers let them through, the service and the rest of this library do not."""
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
