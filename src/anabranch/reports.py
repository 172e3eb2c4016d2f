"""What a consumer says of itself: how a stop went, and how it stands now. Plain values, ready for `--json`."""

import msgspec

from anabranch.records import Record

__all__ = ["ConsumerStatus", "FlushReport", "ShardState", "StopReport"]


class StopReport(msgspec.Struct, frozen=True):
    """How a stop went. Clean means: everything started was finished and committed, and the leases are free."""

    leftovers: tuple[Record[bytes], ...] = ()
    """Records whose handlers still ran at the deadline; they will be handled again."""
    committed: bool = True
    """False if the store took no final checkpoint: what was finished since the last one will be handled again."""
    released: bool = True
    """False if the store gave no answer to the leave: the leases are free only after their expiry."""

    @property
    def clean(self) -> bool:
        return not self.leftovers and self.committed and self.released


class FlushReport(msgspec.Struct, frozen=True):
    """How a flush went. What failed for good is not in it: that is raised."""

    complete: bool = True
    """False if the deadline came first."""
    pending_count: int = 0
    """Records that were still on their way then; they stay on it."""


class ShardState(msgspec.Struct, frozen=True, kw_only=True):
    """One shard that this process holds."""

    stream: str
    shard_id: str
    phase: str
    """reading, ended, stopped."""
    reason: str | None
    """Why it stands still; None while it moves."""
    checkpoint: str | None
    millis_behind_latest: int | None
    unfinished_count: int
    finished_count: int
    held_bytes: int
    fence_token: int


class ConsumerStatus(msgspec.Struct, frozen=True, kw_only=True):
    """This process, now."""

    app: str | None
    member_id: str
    fenced: bool
    """True while no heartbeat was acknowledged for too long: nothing is started."""
    paused: bool
    shards: tuple[ShardState, ...]
    budget_used_bytes: int
    budget_limit_bytes: int
