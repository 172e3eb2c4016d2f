"""Hash keys: how a partition key finds its shard.

A hash key is a 128-bit unsigned integer: the MD5 of the partition key's UTF-8 bytes, read big-endian, or the explicit
hash key that overrides it. Every open shard holds one inclusive range; the ranges of all open shards cover every hash
key exactly once. AWS chose MD5; it has no security purpose here.

No msgspec.Struct here: the platform wheel compiles this module.
"""

import hashlib
import re
from functools import partial
from typing import Final, NamedTuple

from anabranch.limits import HASH_KEY_MAX, PARTITION_KEY_CHARACTERS_MAX

try:  # three times as fast as OpenSSL's for short keys, but not in every build of Python
    from _md5 import md5 as _md5  # type: ignore[import-not-found]
except ImportError:  # pragma: no cover -- depends on how Python was built
    _md5 = partial(hashlib.md5, usedforsecurity=False)

md5: Final = _md5

_HASH_KEY = re.compile(r"0|[1-9][0-9]{0,38}")  # API: pattern of HashKey


def md5_digest(partition_key: str) -> bytes:
    """The hash key as 16 bytes, big-endian, so that they compare like the numbers."""
    digest: bytes = md5(partition_key.encode()).digest()
    return digest


def md5_hash_key(partition_key: str) -> int:
    return int.from_bytes(md5_digest(partition_key))


def parse_hash_key(text: str) -> int:
    if _HASH_KEY.fullmatch(text) is None or (value := int(text)) > HASH_KEY_MAX:
        raise ValueError(f"a hash key is a decimal integer from 0 to 2**128 - 1 without leading zeros, not {text!r}")
    return value


def wrong_partition_key(given: object) -> TypeError:
    return TypeError(f"partition_key is {given!r}; it must be text (str)")


def check_partition_key(partition_key: str) -> str:
    """Returns the key if the service accepts it (1 to 256 Unicode characters)."""
    if not isinstance(partition_key, str):
        raise wrong_partition_key(partition_key)
    if not 1 <= len(partition_key) <= PARTITION_KEY_CHARACTERS_MAX:
        raise ValueError(
            f"a partition key has 1 to {PARTITION_KEY_CHARACTERS_MAX} characters, not {len(partition_key)}"
        )
    try:
        partition_key.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"a partition key must be encodable as UTF-8: {error}") from None
    return partition_key


class HashKeyRange(NamedTuple):
    """An inclusive range of hash keys."""

    start: int
    end: int

    def __contains__(self, key: object) -> bool:
        return isinstance(key, int) and self.start <= key <= self.end

    @property
    def size(self) -> int:
        return self.end - self.start + 1

    def is_adjacent_to(self, other: "HashKeyRange") -> bool:
        return self.end + 1 == other.start or other.end + 1 == self.start


def even_ranges(count: int) -> list[HashKeyRange]:
    """Ranges as AWS makes them: floor(2**128 / count) hash keys each, and the rest in the last one."""
    width = (HASH_KEY_MAX + 1) // count
    starts = [width * i for i in range(count)]
    return [
        HashKeyRange(start, HASH_KEY_MAX if i == count - 1 else start + width - 1) for i, start in enumerate(starts)
    ]
