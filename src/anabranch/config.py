"""Settings by subject: frozen values that are checked whole, so that every violation is named at once.

Each field says what it trades and where its default comes from. Durations are seconds. AWS's own quotas are no settings;
they are in `limits`.
"""

from dataclasses import dataclass, field
from typing import Literal

from anabranch.budget import Budget
from anabranch.errors import ConfigurationError

__all__ = ["CheckpointSettings", "ConsumerSettings", "LeaseSettings", "PollingSettings"]


def _refuse(violations: list[str]) -> None:
    if violations:
        raise ConfigurationError(violations)


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseSettings:
    worker_id: str | None = None
    """A name for people; None: host name and process id. Ownership never depends on it."""
    expiry: float = 10.0
    """A worker that showed no life for this long loses its shards. Shorter recovers faster from crashes and forgives
    shorter pauses; heartbeat, fence and grace follow from it. KCL's default is the same."""
    max_shards: int | None = None
    """How many shards this worker takes at most; None: its fair share."""
    stall_limit: float = 120.0
    """When the event loop has stood still for this long, the worker gives its shards up on purpose."""
    drain_deadline: float = 30.0
    """How long a hand-off waits for running handler calls before the shard is kept instead."""

    def __post_init__(self) -> None:
        violations = []
        if self.expiry < 3.0:
            violations.append(f"expiry is {self.expiry} s; it must be at least 3 s")
        if self.max_shards is not None and self.max_shards < 1:
            violations.append(f"max_shards is {self.max_shards}; it must be at least 1, or None for a fair share")
        if self.stall_limit < self.expiry:
            violations.append(
                f"stall_limit is {self.stall_limit} s; it must not be shorter than expiry, {self.expiry} s"
            )
        if self.drain_deadline <= 0:
            violations.append(f"drain_deadline is {self.drain_deadline} s; it must be positive")
        if self.worker_id is not None and not 1 <= len(self.worker_id) <= 128:
            violations.append("worker_id must have 1 to 128 characters")
        _refuse(violations)


@dataclass(frozen=True, slots=True, kw_only=True)
class PollingSettings:
    shard_share: float = 1.0
    """The part of each shard's read quota (5 reads and 2 MiB a second, shared by all polling applications of a stream)
    that this application may use."""
    idle_interval: float = 1.0
    """The longest pause between two reads of a shard that has nothing new: latency against calls. KCL: 1 s."""
    listing_interval: float = 30.0
    """How often the stream's shards are listed, to find those that no read has named."""
    misrouted: Literal["by_writer", "deliver", "skip"] = "by_writer"
    """What becomes of aggregates with records of another shard: by_writer delivers them, marked, but skips those of our
    own producer, which sends them again."""

    def __post_init__(self) -> None:
        violations = []
        if not 0 < self.shard_share <= 1:
            violations.append(f"shard_share is {self.shard_share}; it must be above 0 and at most 1")
        if not 0.2 <= self.idle_interval <= 60:
            violations.append(f"idle_interval is {self.idle_interval} s; it must be from 0.2 to 60 s")
        if self.listing_interval < 1:
            violations.append(f"listing_interval is {self.listing_interval} s; it must be at least 1 s")
        _refuse(violations)


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointSettings:
    interval: float = 1.0
    """Finished records are committed this often: after a crash, what was finished since the last commit is repeated."""
    records: int = 10_000
    """Commit sooner when this many records of a shard are finished."""
    replay_bytes_max: int = 256 << 20
    """With order="key": how much may be finished beyond an unfinished record, and be read again after a crash."""

    def __post_init__(self) -> None:
        violations = []
        if not 0.01 <= self.interval <= 300:
            violations.append(f"interval is {self.interval} s; it must be from 0.01 to 300 s")
        if self.records < 1:
            violations.append(f"records is {self.records}; it must be at least 1")
        if self.replay_bytes_max < 1 << 20:
            violations.append(f"replay_bytes_max is {self.replay_bytes_max}; it must be at least 1 MiB")
        _refuse(violations)


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsumerSettings:
    leases: LeaseSettings = field(default_factory=LeaseSettings)
    polling: PollingSettings = field(default_factory=PollingSettings)
    checkpoints: CheckpointSettings = field(default_factory=CheckpointSettings)
    budget: Budget | int = 256 << 20
    """Bytes that may be read and unfinished at once; a `Budget` is shared with other consumers of the same loop."""
    start_timeout: float = 120.0
    """How long the start waits for a stream that is being created."""

    def __post_init__(self) -> None:
        if self.start_timeout < 0:
            raise ConfigurationError(f"start_timeout is {self.start_timeout} s; it must not be negative")
