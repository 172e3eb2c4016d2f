"""A shard as the service lists it: immutable but for its end, which is set once when it is closed."""

import msgspec

from anabranch._model.hash_keys import HashKeyRange

__all__ = ["Shard", "shard_index"]


class Shard(msgspec.Struct, frozen=True, kw_only=True):
    shard_id: str
    hash_key_range: HashKeyRange
    starting_sequence_number: int
    ending_sequence_number: int | None = None
    """None while the shard is open."""
    parent_shard_id: str | None = None
    adjacent_parent_shard_id: str | None = None
    """Set for the child of a merge only."""

    @property
    def is_open(self) -> bool:
        return self.ending_sequence_number is None

    @property
    def parent_shard_ids(self) -> tuple[str, ...]:
        """Both parents of a merge, the one of a split, none of a root. Parents may have left the stream already."""
        return tuple(parent for parent in (self.parent_shard_id, self.adjacent_parent_shard_id) if parent is not None)


def shard_index(shard_id: str) -> int:
    """The number in `shardId-000000000042`."""
    prefix, dash, digits = shard_id.rpartition("-")
    if not (dash and prefix and digits.isascii() and digits.isdigit()):
        raise ValueError(f"a shard id looks like shardId-000000000042, not {shard_id!r}")
    return int(digits)
