"""Which shard a record will land in, as far as we know.

              begin                  install
    invalid ─────────► updating ─────────────────► ready
       ▲                  │ fail                     │ invalidate
       └──────────────────┴──────────────────────────┘

- The last listing stays in use in every state, also during a refresh. Only a shard that a response has disproved is
  removed at once; `predict` returns None for its range until the next listing.
- `predict` returns None while nothing is known. Then records are sent alone: an aggregate might straddle two shards.
- `learn` takes every response that disproves a prediction. It ignores a response that is older than the listing, or
  that was predicted from an earlier listing.
- Shards that left the listing are kept for a minute: records in flight were predicted for them, and shortly after a
  reshard the service may still write to them.

Hash keys are 16-byte big-endian strings: MD5 digests are, and bytes compare like the numbers. The map does no I/O: it
is given listings and says when it wants one.
"""

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Final, Literal

import msgspec

from anabranch._core.backoff import backoff_ms
from anabranch._model.entropy import Entropy
from anabranch._model.streams import Shard

HASH_KEY_BYTES: Final = 16
LOWEST: Final = bytes(HASH_KEY_BYTES)
HIGHEST: Final = b"\xff" * HASH_KEY_BYTES

BACKOFF_FIRST_MS: Final = 2_000
BACKOFF_MAX_MS: Final = 30_000
CLOSED_SHARD_KEPT_MS: Final = 60_000
# A stream that was deleted and created again has shards with the same names. A busy producer meets an error in between;
# an idle one would not notice, so after this time it lists the shards again.
CONFIRMED_WITHIN_MS: Final = 60_000


State = Literal["invalid", "updating", "ready"]
Move = Literal["begin", "install", "fail", "invalidate"]

# A refresh that is requested during a refresh changes nothing.
MOVES: Final[dict[State, dict[Move, State]]] = {
    "invalid": {"begin": "updating", "invalidate": "invalid"},
    "updating": {"install": "ready", "fail": "invalid", "invalidate": "updating"},
    "ready": {"invalidate": "invalid"},
}


def digest_of_hash_key(hash_key: int) -> bytes:
    return hash_key.to_bytes(HASH_KEY_BYTES)


class MappedShard(msgspec.Struct, frozen=True):
    """A shard and its range. If the stream is recreated, a shard may differ only in its starting sequence number."""

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
    def __init__(self, *, entropy: Entropy) -> None:
        self.state: State = "invalid"
        self.generation = 0
        """Grows whenever a result of `predict` may have changed."""
        self.updated_at_ms: int | None = None
        """When the current listing was requested. A response seen later may be newer than the listing."""
        self._entropy = entropy
        self._endings: list[bytes] = []
        self.shards: list[MappedShard] = []
        """Current shards, sorted by hash key."""
        self._open: dict[str, MappedShard] = {}
        self._closed: dict[str, tuple[MappedShard, int]] = {}
        self._refresh_began_ms = 0
        self._confirmed_ms = 0
        self._retry_at_ms = 0
        self._failures = 0

    # predictions

    def predict(self, digest: bytes) -> MappedShard | None:
        # Ranges are closed and disjoint, so the shard is the one with the smallest end that is not below the digest.
        place = bisect_left(self._endings, digest)
        if place == len(self.shards):
            return None
        shard = self.shards[place]
        return shard if shard.start <= digest else None

    def find(self, shard_id: str, now_ms: int) -> MappedShard | None:
        """A current shard, or one that left the map less than a minute ago."""
        if (shard := self._open.get(shard_id)) is not None:
            return shard
        shard, kept_until_ms = self._closed.get(shard_id, (None, 0))
        return shard if now_ms < kept_until_ms else None

    def is_current(self, shard: MappedShard) -> bool:
        return self._open.get(shard.shard_id) == shard

    # responses

    def learn(self, predicted: MappedShard, digest: bytes, shard_id: str, now_ms: int) -> None:
        """A record with this hash key was predicted for one shard, and another one took or refused it."""
        is_newer = self.updated_at_ms is None or now_ms > self.updated_at_ms
        if shard_id == predicted.shard_id or not is_newer or not self.is_current(predicted):
            return
        actual = self.find(shard_id, now_ms)
        if actual is not None and actual.holds(digest):
            return  # shortly after a reshard the service may still write to the parent
        self._move("invalidate")
        self._use([shard for shard in self.shards if shard != predicted], now_ms)

    def request_refresh(self) -> None:
        """Asks for a listing that is newer than this moment."""
        self._move("invalidate")

    def confirm(self, now_ms: int) -> None:
        """The stream has responded."""
        self._confirmed_ms = now_ms

    def is_stale(self, now_ms: int) -> bool:
        """The stream has not responded for so long that it may have been recreated."""
        return bool(self.shards) and now_ms - self._confirmed_ms > CONFIRMED_WITHIN_MS

    def clear(self) -> None:
        """The stream is gone or may have been recreated."""
        self._use([], 0)
        self._closed.clear()
        self.updated_at_ms = None
        self._move("invalidate")

    # refreshing

    def wants_refresh(self, now_ms: int) -> bool:
        return self.state == "invalid" and now_ms >= self._retry_at_ms

    @property
    def next_deadline_ms(self) -> int | None:
        """When to start the next refresh."""
        return self._retry_at_ms if self.state == "invalid" else None

    def begin(self, now_ms: int) -> None:
        self._move("begin")
        self._refresh_began_ms = now_ms

    def install(self, listing: Iterable[Shard], now_ms: int) -> bool:
        """Takes a complete listing of the open shards. True if it shows that the stream was recreated."""
        self._move("install")
        self.updated_at_ms = self._refresh_began_ms
        self._confirmed_ms = now_ms
        shards = _without_overlaps(MappedShard.of(shard) for shard in listing if shard.is_open)
        is_recreated = self._is_another_stream(shards)
        self._use([self._open[s.shard_id] if self.is_current(s) else s for s in shards], now_ms)
        if is_recreated:
            self._closed.clear()
        if _covers_everything(shards):
            self._failures = 0
            self._retry_at_ms = 0
        else:  # its pages are from before and after a reshard: list again
            self.state = "invalid"
            self._back_off(now_ms)
        return is_recreated

    def fail(self, now_ms: int) -> None:
        self._move("fail")
        self._back_off(now_ms)

    def _back_off(self, now_ms: int) -> None:
        self._failures += 1
        self._retry_at_ms = now_ms + backoff_ms(
            self._failures, self._entropy, first_ms=BACKOFF_FIRST_MS, max_ms=BACKOFF_MAX_MS, min_share=0.5
        )

    def _move(self, move: Move) -> None:
        self.state = MOVES[self.state][move]

    def _use(self, shards: list[MappedShard], now_ms: int) -> None:
        if shards == self.shards:
            return
        kept = {shard.shard_id: shard for shard in shards}
        self._closed = {name: entry for name, entry in self._closed.items() if now_ms < entry[1] and name not in kept}
        for shard in self.shards:
            if shard.shard_id not in kept:
                self._closed[shard.shard_id] = (shard, now_ms + CLOSED_SHARD_KEPT_MS)
        self.shards = shards
        self._endings = [shard.end for shard in shards]
        self._open = kept
        self.generation += 1

    def _is_another_stream(self, shards: Sequence[MappedShard]) -> bool:
        if not shards or not self.shards:
            return False
        for shard in shards:
            known = self._open.get(shard.shard_id) or self._closed.get(shard.shard_id, (None, 0))[0]
            if known is not None and known != shard:
                return True
        # Unless the stream is recreated, its newest shard closes only when newer ones replace it.
        return max(shard.shard_id for shard in shards) < max(shard.shard_id for shard in self.shards)


def _without_overlaps(shards: Iterable[MappedShard]) -> list[MappedShard]:
    """Sorted by hash key. If a parent and its child are both listed, only the child."""
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
    if not shards or shards[0].start != LOWEST or shards[-1].end != HIGHEST:
        return False
    return all(int.from_bytes(left.end) + 1 == int.from_bytes(right.start) for left, right in pairwise(shards))
