"""Writing the KPL's aggregated records: many small records as the data of one.

    F3 89 9A C2 | protobuf message | MD5 of the message (16 bytes)

    message   0A len partition_key ... | 12 len explicit_hash_key ... | 1A len record ...
    record    08 key_index [10 hash_key_index] 1A len data [22 len tag]...
    tag       0A len key [12 len value]

Both tables hold each text once, in the order of its first use, and the second one only what writers gave. The bytes
are those of the KPL's own encoder. `AggregateBuilder.size` is exact at every moment, so an aggregate is never packed,
measured and packed again. Nothing here knows a shard, a limit of the service, or when an aggregate should be closed.
"""

import hashlib
from collections.abc import Sequence
from typing import Final, NamedTuple

from anabranch._wire.protobuf import encode_varint

__all__ = ["AGGREGATE_OVERHEAD_BYTES", "DIGEST_BYTES", "MAGIC", "PRODUCER_TAG", "AggregateBuilder", "Tag"]

MAGIC: Final = b"\xf3\x89\x9a\xc2"
DIGEST_BYTES: Final = 16
AGGREGATE_OVERHEAD_BYTES: Final = len(MAGIC) + DIGEST_BYTES

# A field's head is its tag and a varint: its value, or the length of what follows. Encoding heads is half the work of
# writing small records, so those of small numbers stand ready.
_READY: Final = 1280


def _head(tag: int, number: int) -> bytes:
    return bytes((tag,)) + encode_varint(number)


_KEY_HEADS: Final = [_head(0x0A, length) for length in range(_READY)]
_KEY_INDEXES: Final = [_head(0x08, index) for index in range(_READY)]
_HEADS: Final = [_head(0x1A, length) for length in range(_READY)]  # of a record in the message, and of data in a record


class Tag(NamedTuple):
    """A note that travels with a record. Every other reader of aggregates skips it."""

    key: str
    value: str | None = None


PRODUCER_TAG: Final = Tag("ab")
"""Our producer's mark on the first record of its aggregates: it sends a whole aggregate again if any of its records
landed in the wrong shard, so a reader may skip a marked one there as a whole (rule F6)."""


class AggregateBuilder:
    """One aggregate being filled. Keys are taken as they come: the producer has checked them where they were given."""

    __slots__ = ("_hash_key_indexes", "_hash_key_parts", "_key_indexes", "_key_parts", "_record_parts", "count", "size")

    def __init__(self) -> None:
        self.count = 0
        self.size = AGGREGATE_OVERHEAD_BYTES
        """The length of what `finish` would return now."""
        self._key_indexes: dict[str, bytes] = {}
        self._hash_key_indexes: dict[str, bytes] = {}
        self._key_parts: list[bytes] = []
        self._hash_key_parts: list[bytes] = []
        self._record_parts: list[bytes] = []

    def add(
        self,
        partition_key: str,
        data: bytes,
        explicit_hash_key: str | None = None,
        tags: Sequence[Tag] = (),
        *,
        size_max: int,
    ) -> bool:
        """Appends the record unless `size` would pass `size_max`; says whether it did.

        The record's sub-sequence number is what `count` was before.
        """
        if explicit_hash_key is not None or tags:
            return self._add_with_extras(partition_key, data, explicit_hash_key, tags, size_max)
        # The hot path: what follows is `size_with` for a record of a key and data alone, written out.
        keys = self._key_indexes
        length = len(data)
        data_head = _HEADS[length] if length < _READY else _head(0x1A, length)
        if partition_key in keys:
            key_index = keys[partition_key]
            length += len(key_index) + len(data_head)
            record_head = _HEADS[length] if length < _READY else _head(0x1A, length)
            size = self.size + len(record_head) + length
            if size > size_max:
                return False
        else:
            index = len(keys)
            key_index = _KEY_INDEXES[index] if index < _READY else _head(0x08, index)
            length += len(key_index) + len(data_head)
            record_head = _HEADS[length] if length < _READY else _head(0x1A, length)
            key = partition_key.encode()
            key_length = len(key)
            key_head = _KEY_HEADS[key_length] if key_length < _READY else _head(0x0A, key_length)
            size = self.size + len(record_head) + length + len(key_head) + key_length
            if size > size_max:
                return False
            keys[partition_key] = key_index
            self._key_parts += (key_head, key)
        self._record_parts += (record_head, key_index, data_head, data)
        self.size = size
        self.count += 1
        return True

    def size_with(
        self, partition_key: str, data: bytes, explicit_hash_key: str | None = None, tags: Sequence[Tag] = ()
    ) -> int:
        """What `size` would be after this record, exactly."""
        size = self.size
        length = len(_head(0x1A, len(data))) + len(data) + len(_encode_tags(tags))
        key_index = self._key_indexes.get(partition_key)
        if key_index is None:
            key_index = _head(0x08, len(self._key_indexes))
            size += len(_encode_text(0x0A, partition_key))
        length += len(key_index)
        if explicit_hash_key is not None:
            hash_key_index = self._hash_key_indexes.get(explicit_hash_key)
            if hash_key_index is None:
                hash_key_index = _head(0x10, len(self._hash_key_indexes))
                size += len(_encode_text(0x12, explicit_hash_key))
            length += len(hash_key_index)
        return size + len(_head(0x1A, length)) + length

    def finish(self) -> bytes:
        assert self.count > 0, "an aggregate without records is none"
        message = b"".join(self._key_parts + self._hash_key_parts + self._record_parts)
        return b"%b%b%b" % (MAGIC, message, hashlib.md5(message, usedforsecurity=False).digest())

    def _add_with_extras(
        self, partition_key: str, data: bytes, explicit_hash_key: str | None, tags: Sequence[Tag], size_max: int
    ) -> bool:
        size = self.size_with(partition_key, data, explicit_hash_key, tags)
        if size > size_max:
            return False
        key_index = self._key_indexes.get(partition_key)
        if key_index is None:
            key_index = self._key_indexes[partition_key] = _head(0x08, len(self._key_indexes))
            self._key_parts.append(_encode_text(0x0A, partition_key))
        hash_key_index = b""
        if explicit_hash_key is not None:
            hash_key_index = self._hash_key_indexes.get(explicit_hash_key, b"")
            if not hash_key_index:
                hash_key_index = self._hash_key_indexes[explicit_hash_key] = _head(0x10, len(self._hash_key_indexes))
                self._hash_key_parts.append(_encode_text(0x12, explicit_hash_key))
        record = (key_index, hash_key_index, _head(0x1A, len(data)), data, _encode_tags(tags))
        self._record_parts.append(_head(0x1A, sum(map(len, record))))
        self._record_parts += record
        self.size = size
        self.count += 1
        return True


def _encode_text(tag: int, text: str) -> bytes:
    encoded = text.encode()
    return _head(tag, len(encoded)) + encoded


def _encode_tags(tags: Sequence[Tag]) -> bytes:
    out = b""
    for key, value in tags:
        content = _encode_text(0x0A, key) + (b"" if value is None else _encode_text(0x12, value))
        out += _head(0x22, len(content)) + content
    return out
