"""Tells of records that left their stream before they were read (rule T4).

Keeps the trim horizon of each stream, by each look that somebody takes at it anyway. Whether records were there is more
than anybody can know: what may have been lost is told, once for each gap, since the reader then goes on behind it.
"""

from anabranch._core.reading.horizon import Horizon, may_have_lost
from anabranch._engine.outside import Outside
from anabranch._engine.session import Session
from anabranch._wire.messages import StreamSummary
from anabranch.events import DataLost

__all__ = ["Losses"]


class Losses:
    def __init__(self, outside: Outside) -> None:
        self._outside = outside
        self._horizons: dict[str, Horizon] = {}

    def horizon_of(self, stream_key: str) -> Horizon:
        return self._horizons[stream_key]

    def look(self, stream_key: str, summary: StreamSummary) -> None:
        server_seconds = summary.server_seconds or self._outside.clock.wall_ms() / 1000
        known = self._horizons.get(stream_key)
        if known is None:
            self._horizons[stream_key] = Horizon(summary.retention_hours, server_seconds)
        else:
            known.look(summary.retention_hours, server_seconds)

    def tell(self, session: Session) -> None:
        """To be called after a look: the retention may have been raised since the last one."""
        horizon_seconds, position = session.horizon.reached_seconds, session.read_after
        if may_have_lost(session.read_through_seconds, horizon_seconds):
            self._outside.emit(
                DataLost(
                    stream=session.stream.name,
                    shard_id=session.shard_id,
                    from_position=session.row.start.type if position is None else str(position.sequence_number),
                    read_through_seconds=session.read_through_seconds,
                    trimmed_through_seconds=horizon_seconds,
                )
            )
