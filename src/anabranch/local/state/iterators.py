"""Shard iterators: a position in a shard and the time it was given out, as an opaque text.

Shaped like AWS's: base64 of eight bytes that read 1 and of 16-byte blocks, another text on every call. All of the
position is inside, so iterators outlive a restart; a checksum tells garbage apart. Nothing is secret.
"""

import binascii
import struct
from base64 import b64decode, b64encode
from hashlib import blake2b
from typing import Final, NamedTuple

from anabranch._model.entropy import Entropy

__all__ = ["ShardIterator", "decode_iterator", "encode_iterator"]

_HEAD: Final = (1).to_bytes(8, "big")
# nonce, when it was given out, the stream's creation, shard index, sequence number, length of the name
_FIELDS: Final = struct.Struct(">QQQI24sB")
_DIGEST_BYTES: Final = 16
_BYTES_MIN: Final = 152  # 224 characters with one block more, which is what AWS's usually have
_BLOCK_BYTES: Final = 16


class ShardIterator(NamedTuple):
    stream_name: str
    stream_created_ms: int
    shard_index: int
    position: int
    """The lowest sequence number that will be read."""
    given_ms: int


def encode_iterator(iterator: ShardIterator, entropy: Entropy) -> str:
    name = iterator.stream_name.encode()
    fields = _FIELDS.pack(
        entropy.getrandbits(64),
        iterator.given_ms,
        iterator.stream_created_ms,
        iterator.shard_index,
        iterator.position.to_bytes(24, "big"),
        len(name),
    )
    plain = _HEAD + fields + name
    length = max(_BYTES_MIN + _BLOCK_BYTES, len(plain) + _DIGEST_BYTES)
    length += -(length - _BYTES_MIN) % _BLOCK_BYTES
    plain = plain.ljust(length - _DIGEST_BYTES, b"\0")
    return b64encode(plain + _digest(plain)).decode()


def decode_iterator(text: str) -> ShardIterator | None:
    """None for anything that was never given out. As AWS does, it takes an iterator that is still in quotes."""
    if len(text) > 1 and text[0] == text[-1] == '"':
        text = text[1:-1]
    try:
        raw = b64decode(text.encode("ascii"), validate=True)
    except (binascii.Error, UnicodeEncodeError):
        return None
    plain, digest = raw[:-_DIGEST_BYTES], raw[-_DIGEST_BYTES:]
    if not plain.startswith(_HEAD) or digest != _digest(plain):
        return None
    _, given_ms, created_ms, shard_index, position, name_length = _FIELDS.unpack_from(plain, len(_HEAD))
    begin = len(_HEAD) + _FIELDS.size
    name = plain[begin : begin + name_length].decode()
    return ShardIterator(name, created_ms, shard_index, int.from_bytes(position, "big"), given_ms)


def _digest(plain: bytes) -> bytes:
    return blake2b(plain, digest_size=_DIGEST_BYTES, person=b"shard-iterator").digest()
