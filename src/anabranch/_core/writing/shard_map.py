"""Which shard a record will land in, as far as it is known.

              begin                  install
    INVALID ─────────► UPDATING ─────────────────► READY
       ▲                  │ fail                     │ invalidate
       └──────────────────┴──────────────────────────┘

Rules that hold here:

- The last listing stays in use in every state: a refresh never takes an answer away. Only what a response has
  disproved is taken out at once, and `predict` is None for that part of the hash space until a listing fills it.
- `predict` is None while nothing is known. Then a record goes alone, since an aggregate might straddle two shards.
- `invalidate` is safe to call for every surprising response: one that is older than the listing, or that names a shard
  which the listing no longer has, asks for nothing.
- Shards that have left the listing are remembered for a minute: records in flight were predicted for them, and for a
  moment after a reshard the service may still write to them.

Hash keys are 16-byte big-endian strings here, since an MD5 digest is one and bytes compare as the numbers do. The map
fetches nothing: listings are given to it, and it says when it wants one.
"""

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from enum import Enum
from itertools import pairwise
from typing import Final

import msgspec

from anabranch._core.backoff import backoff_ms
from anabranch._model.entropy import Entropy
from anabranch._model.streams import Shard

HASH_KEY_BYTES: Final = 16
_LOWEST: Final = bytes(HASH_KEY_BYTES)
_HIGHEST: Final = b"\xff" * HASH_KEY_BYTES

BACKOFF_FIRST_MS: Final = 2_000
BACKOFF_MAX_MS: Final = 30_000
CLOSED_SHARD_KEPT_MS: Final = 60_000
# A stream that was deleted and created anew, with shards of the same names, answers as if nothing had happened. Who
# writes all the time meets an error in between; who has not heard of it for so long asks before trusting the map.
CONFIRMED_WITHIN_MS: Final = 60_000


class MapState(Enum):
    INVALID = "INVALID"
    UPDATING = "UPDATING"
    READY = "READY"


# What may follow what. Asking for more while a refresh is under way changes nothing.
_TRANSITIONS: Final = {
    ("begin", MapState.INVALID): MapState.UPDATING,
    ("install", MapState.UPDATING): MapState.READY,
    ("fail", MapState.UPDATING): MapState.INVALID,
    ("invalidate", MapState.INVALID): MapState.INVALID,
    ("invalidate", MapState.UPDATING): MapState.UPDATING,
    ("invalidate", MapState.READY): MapState.INVALID,
}


def digest_of_hash_key(hash_key: int) -> bytes:
    return hash_key.to_bytes(HASH_KEY_BYTES)


class MappedShard(msgspec.Struct, frozen=True):
    """A shard and its range. Two are the same only if they began at the same place: streams may be created anew."""

    shard_id: str
    start: bytes
    end: bytes
    starting_sequence_number: int

    @classmethod
    def of(cls, shard: Shard) -> "MappedShard":
        low, high = shard.hash_key_range
        return cls(shard.shard_id, digest_of_hash_key(low), digest_of_hash_key(high), shard.starting_sequence_number)

    def holds(self, digest: bytes) -> bool:
        return self.start <= digest <= self.end


class ShardMap:
    __slots__ = (
        "_closed", "_confirmed_ms", "_endings", "_entropy", "_failures", "_open", "_refresh_began_ms", "_retry_at_ms",
        "_shards", "generation", "state", "updated_at_ms",
    )  # fmt: skip

    def __init__(self, *, entropy: Entropy) -> None:
        self.state = MapState.INVALID
        self.generation = 0
        """Grows whenever an answer of `predict` may have changed."""
        self.updated_at_ms: int | None = None
        """When the listing in use was asked for: what was seen later than this may be newer than it."""
        self._entropy = entropy
        self._endings: list[bytes] = []
        self._shards: list[MappedShard] = []
        self._open: dict[str, MappedShard] = {}
        self._closed: dict[str, tuple[MappedShard, int]] = {}
        self._refresh_began_ms = 0
        self._confirmed_ms = 0
        self._retry_at_ms = 0
        self._failures = 0

    # answers

    @property
    def shards(self) -> Sequence[MappedShard]:
        """Those in use, by hash key."""
        return self._shards

    def predict(self, digest: bytes) -> MappedShard | None:
        # Ranges are closed and disjoint, so the shard is the one with the smallest end that is not below the digest.
        place = bisect_left(self._endings, digest)
        if place == len(self._shards):
            return None
        shard = self._shards[place]
        return shard if shard.start <= digest else None

    def find(self, shard_id: str, now_ms: int) -> MappedShard | None:
        """A shard in use, or one that left the map less than a minute ago."""
        if (shard := self._open.get(shard_id)) is not None:
            return shard
        shard, kept_until_ms = self._closed.get(shard_id, (None, 0))
        return shard if now_ms < kept_until_ms else None

    def is_current(self, shard: MappedShard) -> bool:
        return self._open.get(shard.shard_id) == shard

    # what responses teach

    def invalidate(self, seen_at_ms: int, predicted: MappedShard) -> bool:
        """Something seen at that time contradicts the prediction. False if the map in use is past that already."""
        if self.updated_at_ms is not None and seen_at_ms <= self.updated_at_ms:
            return False
        if not self.is_current(predicted):
            return False
        self._move("invalidate")
        return True

    def learn(self, predicted: MappedShard, digest: bytes, shard_id: str, now_ms: int) -> None:
        """A record with this hash key was predicted for one shard and found in, or refused by, the named one."""
        if shard_id == predicted.shard_id:
            return
        actual = self.find(shard_id, now_ms)
        if actual is not None and actual.holds(digest):
            return  # a parent that is still written to for a moment after its split or merge
        if self.invalidate(now_ms, predicted):
            self._use([shard for shard in self._shards if shard != predicted], now_ms)

    def distrust(self) -> None:
        """Wants a listing that is newer than this moment."""
        self._move("invalidate")

    def confirm(self, now_ms: int) -> None:
        """The stream has answered."""
        self._confirmed_ms = now_ms

    def is_doubtful(self, now_ms: int) -> bool:
        """Nothing has been heard of the stream for so long that it may be another by now."""
        return bool(self._shards) and now_ms - self._confirmed_ms > CONFIRMED_WITHIN_MS

    def forget(self) -> None:
        """The stream is gone, or may be: what there is under its name has to be asked for."""
        self._use([], 0)
        self._closed.clear()
        self.updated_at_ms = None
        self._move("invalidate")

    # refreshing

    def wants_refresh(self, now_ms: int) -> bool:
        return self.state is MapState.INVALID and now_ms >= self._retry_at_ms

    @property
    def next_deadline_ms(self) -> int | None:
        """When a refresh is to be tried, or tried again."""
        return self._retry_at_ms if self.state is MapState.INVALID else None

    def begin(self, now_ms: int) -> None:
        self._move("begin")
        self._refresh_began_ms = now_ms

    def install(self, listing: Iterable[Shard], now_ms: int) -> bool:
        """Takes a complete listing of the open shards. True if it shows that the stream was created anew."""
        self._move("install")
        self.updated_at_ms = self._refresh_began_ms
        self._confirmed_ms = now_ms
        shards = _without_overlaps(MappedShard.of(shard) for shard in listing if shard.is_open)
        created_anew = self._is_another_stream(shards)
        self._use([self._open[s.shard_id] if self.is_current(s) else s for s in shards], now_ms)
        if created_anew:
            self._closed.clear()
        if _covers_everything(shards):
            self._failures = 0
            self._retry_at_ms = 0
        else:  # pages from two instants around a reshard; what is missing is asked for again
            self.state = MapState.INVALID
            self._back_off(now_ms)
        return created_anew

    def fail(self, now_ms: int) -> None:
        self._move("fail")
        self._back_off(now_ms)

    def _back_off(self, now_ms: int) -> None:
        self._failures += 1
        self._retry_at_ms = now_ms + backoff_ms(
            self._failures, self._entropy, first_ms=BACKOFF_FIRST_MS, max_ms=BACKOFF_MAX_MS, min_share=0.5
        )

    def _move(self, event: str) -> None:
        self.state = _TRANSITIONS[event, self.state]

    def _use(self, shards: list[MappedShard], now_ms: int) -> None:
        if shards == self._shards:
            return
        kept = {shard.shard_id: shard for shard in shards}
        self._closed = {name: entry for name, entry in self._closed.items() if now_ms < entry[1] and name not in kept}
        for shard in self._shards:
            if shard.shard_id not in kept:
                self._closed[shard.shard_id] = (shard, now_ms + CLOSED_SHARD_KEPT_MS)
        self._shards = shards
        self._endings = [shard.end for shard in shards]
        self._open = kept
        self.generation += 1

    def _is_another_stream(self, shards: Sequence[MappedShard]) -> bool:
        if not shards or not self._shards:
            return False
        for shard in shards:
            known = self._open.get(shard.shard_id) or self._closed.get(shard.shard_id, (None, 0))[0]
            if known is not None and known != shard:
                return True
        # In one life of a stream the newest shard closes only by bearing a newer one.
        return max(shard.shard_id for shard in shards) < max(shard.shard_id for shard in self._shards)


def _without_overlaps(shards: Iterable[MappedShard]) -> list[MappedShard]:
    """By hash key; where a parent is listed beside its child, the younger one."""
    kept: list[MappedShard] = []
    for shard in sorted(shards, key=lambda shard: (shard.start, shard.end)):
        while kept and kept[-1].end >= shard.start:
            if kept[-1].starting_sequence_number > shard.starting_sequence_number:
                break
            kept.pop()
        else:
            kept.append(shard)
    return kept


def _covers_everything(shards: Sequence[MappedShard]) -> bool:
    if not shards or shards[0].start != _LOWEST or shards[-1].end != _HIGHEST:
        return False
    return all(int.from_bytes(left.end) + 1 == int.from_bytes(right.start) for left, right in pairwise(shards))
