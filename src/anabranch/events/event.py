"""What every event has in common."""

import logging
from typing import ClassVar

import msgspec

__all__ = ["Event"]


class Event(msgspec.Struct, frozen=True, kw_only=True):
    """Something that happened."""

    level: ClassVar[int] = logging.INFO

    stream: str | None = None
    shard_id: str | None = None

    def __str__(self) -> str:
        where = "/".join(part for part in (self.stream, self.shard_id) if part)
        return f"{where}: {self.sentence()}" if where else self.sentence()

    def sentence(self) -> str:
        return (type(self).__doc__ or "").strip()
