"""What follows a failed attempt at a record: the event that reports it, and who is told when its shard must stop."""

from collections.abc import Callable
from typing import TypeAlias

from anabranch._engine.handling.error_text import error_text
from anabranch._engine.handling.handling import UndecodableError
from anabranch._engine.session import Session
from anabranch.events import HandlerFailed
from anabranch.records import Record

__all__ = ["OnFailed", "OnUndecodable", "failed_attempt"]

OnFailed: TypeAlias = Callable[[Session, Record[bytes], str, BaseException | None], None]
"""No further attempt at this record: its shard stops, for this reason and because of this error."""
OnUndecodable: TypeAlias = Callable[[Session, UndecodableError], None]


def failed_attempt(
    session: Session, record: Record[bytes], error: BaseException, *, attempt: int, retry_in_ms: int | None
) -> HandlerFailed:
    return HandlerFailed(
        stream=session.stream.name,
        shard_id=session.shard_id,
        position=str(record.position),
        partition_key=record.partition_key,
        attempt=attempt,
        error=error_text(error),
        retry_in_ms=retry_in_ms,
        exception=error,
    )
