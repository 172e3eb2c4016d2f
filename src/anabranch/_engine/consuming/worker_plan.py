"""What a worker is to do, as one value: settled before it starts."""

from dataclasses import dataclass, field

from anabranch._core.leases.timing import LeaseTiming
from anabranch._core.reading.pace import PaceLimits
from anabranch._engine.consuming.end_watch import Ends
from anabranch._engine.leases.member import MemberProfile
from anabranch._engine.shards.beginning import Start
from anabranch._model.leases import AppRow
from anabranch._model.streams import StreamName
from anabranch.config import ConsumerSettings

__all__ = ["WorkerPlan"]


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerPlan:
    app: AppRow
    streams: tuple[StreamName, ...]
    start: Start
    profile: MemberProfile
    timing: LeaseTiming
    pace: PaceLimits
    settings: ConsumerSettings = field(default_factory=ConsumerSettings)
    store_name: str = "memory"
    ends: Ends = field(default_factory=Ends)
    until_seconds: float | None = None
    """Records that arrived at this time or later are left alone."""
