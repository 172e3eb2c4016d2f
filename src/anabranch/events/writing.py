"""What happens to a producer."""

import logging

from anabranch.events.event import Event

__all__ = [
    "AggregateStraddled",
    "AggregationOff",
    "HookFailed",
    "KeyBlocked",
    "OrderUnconfirmed",
    "RecordsAbandoned",
    "ShardMapFailed",
    "WriteFailed",
    "WriteThrottled",
    "WriterFailed",
]


class AggregationOff(Event, frozen=True, kw_only=True):
    """The producer sends every record alone, in no order: the service places records itself (AUTO distribution)."""

    level = logging.WARNING


class AggregateStraddled(Event, frozen=True, kw_only=True):
    """An aggregate landed where not all of its records belong; all of them are sent again."""

    record_count: int

    def sentence(self) -> str:
        return f"an aggregate met a reshard: its {self.record_count} records are sent again where they belong"


class HookFailed(Event, frozen=True, kw_only=True):
    """A function that the user gave raised an error; nothing else changes by it."""

    level = logging.ERROR
    hook: str
    error: str

    def sentence(self) -> str:
        return f"{self.hook} raised {self.error}"


class KeyBlocked(Event, frozen=True, kw_only=True):
    """Records failed without being sent, as an earlier one of their key had failed and nobody has seen that yet.

    The first time it is told at once, then at most every ten seconds.
    """

    level = logging.WARNING
    partition_key: str
    """Of the last one."""
    record_count: int
    """Since this was last told, over all keys of the stream."""

    def sentence(self) -> str:
        return (
            f"{self.record_count} records failed without being sent (last partition key: {self.partition_key!r}): an "
            "earlier record of that key was not delivered, and nobody has seen that failure. Await its delivery, call "
            "flush(), or use on_undelivered="
        )


class OrderUnconfirmed(Event, frozen=True, kw_only=True):
    """The service numbered a record before one that had been written earlier."""

    level = logging.WARNING
    sequence_number: str

    def sentence(self) -> str:
        return f"sequence number {self.sequence_number} is below that of the record written before it"


class RecordsAbandoned(Event, frozen=True, kw_only=True):
    """A producer was not closed before its event loop or the interpreter ended: records are lost, or may be."""

    level = logging.ERROR
    record_count: int
    """Records that were not delivered, and failures that nobody had seen."""

    def sentence(self) -> str:
        return (
            f"the producer was not closed: {self.record_count} records were not delivered, or nobody saw that they "
            "failed. Use `async with`, or await close()"
        )


class ShardMapFailed(Event, frozen=True, kw_only=True):
    """The stream's shards could not be listed; the producer goes on with what it knows."""

    level = logging.WARNING
    error: str

    def sentence(self) -> str:
        return f"the shards could not be listed and will be asked for again: {self.error}"


class WriteFailed(Event, frozen=True, kw_only=True):
    """A whole call to write records failed."""

    level = logging.WARNING
    error: str
    entry_count: int

    def sentence(self) -> str:
        return f"a call with {self.entry_count} records failed: {self.error}"


class WriteThrottled(Event, frozen=True, kw_only=True):
    """A shard refused most of the last records, as it is over its limits; the producer writes to it more slowly."""

    share_percent: int

    def sentence(self) -> str:
        return f"over its limits; written to at {self.share_percent} % of the full rate"


class WriterFailed(Event, frozen=True, kw_only=True):
    """The producer ended in an unexpected error; every record that was on its way has failed."""

    level = logging.CRITICAL
    error: str
    record_count: int
    """Records that were not delivered, or whose failure nobody has seen yet."""

    def sentence(self) -> str:
        return f"the producer failed unexpectedly, with {self.record_count} records not delivered: {self.error}"
