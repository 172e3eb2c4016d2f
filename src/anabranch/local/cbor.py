"""Encodes and decodes CBOR bodies, AWS's `application/x-amz-cbor-1.1`, which the AWS SDK for Java uses.

Values are None, bool, int, float, str, bytes, list, dict with text keys, `Timestamp`, and stored records. AWS differs
from RFC 8949 in one point: tag 1 holds whole *milliseconds*, not seconds, so a standard decoder rejects it or is wrong
by a factor of 1000. A client may also leave the tag out. `decode` then returns a plain number: only the operation's
schema says that the member is a timestamp.

`decode` reads definite and indefinite lengths; `encode` writes definite ones. Depth and number of items are limited,
and each length is checked against the remaining bytes, so a hostile body takes at most a small multiple of its own size
in memory. Tags other than 1, simple values other than false, true, null and undefined, and keys that are not text are
rejected: AWS uses none of them.
"""

import struct
from collections.abc import Iterable
from typing import Any, Final

from anabranch.errors import CodecError
from anabranch.local.state.identifiers import Timestamp
from anabranch.local.state.shard import StoredRecord

DEPTH_MAX: Final = 32
ITEMS_MAX: Final = 1 << 20  # a full GetRecords response has about 120,000

_UNSIGNED, _NEGATIVE, _BYTES, _TEXT, _ARRAY, _MAP, _TAG, _SIMPLE = range(8)
_TIMESTAMP_TAG: Final = 1
_INDEFINITE_BYTES: Final = 0x5F
_INDEFINITE_TEXT: Final = 0x7F
_BREAK: Final = 0xFF
_INDEFINITE: Final = -1
_FLOATS: Final = {25: struct.Struct(">e"), 26: struct.Struct(">f"), 27: struct.Struct(">d")}
_SIMPLE_VALUES: Final[dict[int, bool | None]] = {20: False, 21: True, 22: None, 23: None}

_FLOAT_64: Final = struct.Struct(">Bd")
_ARGUMENTS: Final = (  # (limit, additional information, packer of initial byte and argument)
    (1 << 8, 24, struct.Struct(">BB")),
    (1 << 16, 25, struct.Struct(">BH")),
    (1 << 32, 26, struct.Struct(">BI")),
    (1 << 64, 27, struct.Struct(">BQ")),
)
_LIST_TYPES: Final = (list, tuple)
_CONSTANTS: Final = {False: b"\xf4", True: b"\xf5", None: b"\xf6"}
_ONE_BYTE_HEADS: Final = tuple(bytes([initial]) for initial in range(256))


def decode(body: bytes | bytearray | memoryview) -> Any:
    """Returns the single value in `body`. The value holds no reference to `body`."""
    reader = _Reader(bytes(body))
    try:
        value = reader.read(0)
    except IndexError:
        raise CodecError(f"CBOR body of {len(body)} bytes ends in the middle of a value") from None
    except UnicodeDecodeError as error:
        raise CodecError(f"CBOR text is not UTF-8: {error}") from None
    if reader.position != len(reader.body):
        raise CodecError(f"CBOR body has {len(reader.body) - reader.position} bytes after its value")
    return value


class _Reader:
    __slots__ = ("body", "items_left", "position")

    def __init__(self, body: bytes) -> None:
        self.body = body
        self.position = 0
        self.items_left = ITEMS_MAX

    def read(self, depth: int) -> Any:
        self.items_left -= 1
        if self.items_left < 0:
            raise CodecError(f"CBOR body has more than {ITEMS_MAX} items")
        start = self.position
        initial = self.body[start]
        major = initial >> 5
        if major == _TEXT:
            if initial == _INDEFINITE_TEXT:
                return "".join([chunk.decode() for chunk in self._chunks(_TEXT)])
            return self._string(initial).decode()
        if major == _BYTES:
            return self._string(initial) if initial != _INDEFINITE_BYTES else b"".join(self._chunks(_BYTES))
        if major == _SIMPLE:
            return self._simple(initial & 31)
        argument = self._argument()
        if major == _UNSIGNED and argument != _INDEFINITE:
            return argument
        if major == _NEGATIVE and argument != _INDEFINITE:
            return -1 - argument
        if depth >= DEPTH_MAX:
            raise CodecError(f"CBOR body is nested deeper than {DEPTH_MAX} levels")
        if major == _MAP:
            return self._map(argument, depth + 1)
        if major == _ARRAY:
            return [self.read(depth + 1) for _ in self._repeat(argument)]
        if major == _TAG and argument == _TIMESTAMP_TAG:
            return self._timestamp(depth + 1)
        raise CodecError(f"CBOR byte 0x{initial:02x} at offset {start} starts a value that AWS does not use")

    def _string(self, initial: int) -> bytes:
        """A text or byte string of definite length. Most values are short strings, so a short length is read inline."""
        information = initial & 31
        if information < 24:
            size, start = information, self.position + 1
        else:
            size, start = self._argument(), self.position
        end = start + size
        if end > len(self.body):
            raise CodecError(f"CBOR length {size} at offset {start} passes the end of the body")
        self.position = end
        return self.body[start:end]

    def _argument(self) -> int:
        """Reads the initial byte and its argument: a value, a length, a count or a tag."""
        start = self.position
        information = self.body[start] & 31
        self.position = start + 1
        if information < 24:
            return information
        if information == 24:
            self.position = start + 2
            return self.body[start + 1]
        if information == 31:
            return _INDEFINITE
        if information > 27:
            raise CodecError(f"CBOR additional information {information} is reserved")
        return int.from_bytes(self._take(1 << (information - 24)))

    def _take(self, size: int) -> bytes:
        end = self.position + size
        if end > len(self.body):
            raise CodecError(f"CBOR length {size} at offset {self.position} passes the end of the body")
        taken = self.body[self.position : end]
        self.position = end
        return taken

    def _chunks(self, major: int) -> Iterable[bytes]:
        self.position += 1
        while not self._skip_break():
            initial = self.body[self.position]
            if initial >> 5 != major or initial & 31 == 31:
                raise CodecError("CBOR string of indefinite length has an invalid chunk")
            self.items_left -= 1
            if self.items_left < 0:
                raise CodecError(f"CBOR body has more than {ITEMS_MAX} items")
            yield self._string(initial)

    def _skip_break(self) -> bool:
        """Skips the break that ends an indefinite length. Returns False if there is none here."""
        if self.body[self.position] != _BREAK:
            return False
        self.position += 1
        return True

    def _repeat(self, count: int) -> Iterable[object]:
        """Repeats a loop `count` times, or until the break if the length is indefinite."""
        return range(count) if count != _INDEFINITE else iter(self._skip_break, True)

    def _map(self, count: int, depth: int) -> dict[str, Any]:
        members: dict[str, Any] = {}
        for _ in self._repeat(count):
            key = self._key(depth)
            members[key] = self.read(depth)
        return members

    def _key(self, depth: int) -> str:
        initial = self.body[self.position]
        if initial >> 5 == _TEXT and initial != _INDEFINITE_TEXT:
            return self._string(initial).decode()
        key = self.read(depth)
        if not isinstance(key, str):
            raise CodecError(f"CBOR map has a key that is not text: {type(key).__name__}")
        return key

    def _timestamp(self, depth: int) -> Timestamp:
        value = self.read(depth)
        if type(value) not in {int, float}:
            raise CodecError(f"CBOR tag 1 holds a {type(value).__name__}, not milliseconds since 1970")
        return Timestamp.from_milliseconds(value)

    def _simple(self, information: int) -> Any:
        self.position += 1
        layout = _FLOATS.get(information)
        if layout is not None:
            return layout.unpack(self._take(layout.size))[0]
        if information not in _SIMPLE_VALUES:
            raise CodecError(f"unexpected CBOR simple value {information} (31 is a break)")
        return _SIMPLE_VALUES[information]


def encode(value: Any) -> bytes:
    parts: list[bytes] = []
    try:
        _write(value, parts, 0)
    except UnicodeEncodeError as error:
        raise CodecError(f"text that is not valid Unicode cannot be encoded as CBOR: {error}") from None
    return b"".join(parts)


def _head(major: int, argument: int) -> bytes:
    if argument < 24:
        return _ONE_BYTE_HEADS[major << 5 | argument]
    for limit, information, layout in _ARGUMENTS:
        if argument < limit:
            return layout.pack(major << 5 | information, argument)
    raise CodecError(f"integer {argument} is too large for CBOR")


def _write(value: Any, parts: list[bytes], depth: int) -> None:
    """Frequent types come first. Timestamp comes before float and bool before int, as they are subclasses of these."""
    if isinstance(value, str):
        text = value.encode()
        parts += (_head(_TEXT, len(text)), text)
    elif isinstance(value, bytes):
        parts += (_head(_BYTES, len(value)), value)
    elif isinstance(value, Timestamp):
        parts.append(_ONE_BYTE_HEADS[_TAG << 5 | _TIMESTAMP_TAG])
        _write(value.milliseconds, parts, depth)
    elif value is None or value is True or value is False:
        parts.append(_CONSTANTS[value])
    elif isinstance(value, int):
        parts.append(_head(_UNSIGNED, value) if value >= 0 else _head(_NEGATIVE, -1 - value))
    elif isinstance(value, float):
        parts.append(_FLOAT_64.pack(_SIMPLE << 5 | 27, value))
    elif depth >= DEPTH_MAX:
        raise CodecError(f"value is nested deeper than {DEPTH_MAX} levels, the maximum for CBOR")
    elif isinstance(value, dict):
        parts.append(_head(_MAP, len(value)))
        for key, member in value.items():
            _write(key, parts, depth + 1)
            _write(member, parts, depth + 1)
    elif isinstance(value, _LIST_TYPES):
        parts.append(_head(_ARRAY, len(value)))
        for item in value:
            _write(item, parts, depth + 1)
    elif isinstance(value, StoredRecord):
        _write(value.members(), parts, depth)
    else:
        raise CodecError(f"cannot encode a value of type {type(value).__name__} as CBOR")
