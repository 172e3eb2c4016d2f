"""The few pieces of the protobuf wire format that an aggregate is made of.

Readers take the buffer, a position and the end of the enclosing message, and return the position after what they read;
they never look past that end. Whatever a conforming parser refuses is a `CodecError`. Which fields there are, and what
they mean, is known elsewhere.
"""

from typing import Final

from anabranch.errors import CodecError

__all__ = ["encode_varint", "read_length", "read_tag", "read_varint", "skip_field"]

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
_GROUP_DEPTH_MAX: Final = 100  # where protobuf's own parsers stop


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
    """An unsigned number of at most 64 bits; needlessly long encodings are legal, bits above the 64th are dropped."""
    number = shift = 0
    for at in range(position, min(end, position + bytes_max)):
        byte = data[at]
        number |= (byte & 0x7F) << shift
        if byte < 0x80:
            return number & 0xFFFF_FFFF_FFFF_FFFF, at + 1
        shift += 7
    raise CodecError(f"the number at byte {position} does not end where it should")


def read_tag(data: bytes, position: int, end: int) -> tuple[int, int]:
    tag, after = read_varint(data, position, end, _SHORT_VARINT_BYTES_MAX)
    if not _TAG_MIN <= tag <= _TAG_MAX:
        raise CodecError(f"the field at byte {position} has the impossible tag {tag}")
    return tag, after


def read_length(data: bytes, position: int, end: int) -> tuple[int, int]:
    """Where a length-delimited field's content starts and stops."""
    length, start = read_varint(data, position, end, _SHORT_VARINT_BYTES_MAX)
    if length > end - start:
        raise CodecError(f"the field at byte {position} claims {length} bytes, {end - start} are left")
    return start, start + length


def skip_field(data: bytes, tag: int, position: int, end: int) -> int:
    """The position after the content of a field that means nothing to us; its tag was read already."""
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
            raise CodecError(f"the field before byte {position} has the impossible tag {tag}")
        if position > end:
            raise CodecError(f"the message ends inside the field before byte {position}")
        if not groups:
            return position
        tag, position = read_tag(data, position, end)
