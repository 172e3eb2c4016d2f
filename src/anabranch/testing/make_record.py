"""A record for a unit test, without a stream."""

from typing import Any

from anabranch._model.streams import BEFORE_FIRST_SUB
from anabranch.records import Record

__all__ = ["make_record"]

_SEQUENCE_NUMBER = "49590338271490256608559692538361571095921575989136588898"


def make_record(
    data: bytes = b"",
    partition_key: str = "key",
    *,
    value: Any = None,
    stream: str = "stream",
    shard_id: str = "shardId-000000000000",
    sequence_number: str = _SEQUENCE_NUMBER,
    sub_sequence_number: int = BEFORE_FIRST_SUB,
    arrival_seconds: float = 1_700_000_000.0,
) -> Record[Any]:
    """What a handler gets. `value` is what `decode=` would have made of the data; the data itself if it is left out."""
    return Record(
        stream=stream,
        shard_id=shard_id,
        sequence_number=sequence_number,
        sub_sequence_number=sub_sequence_number,
        partition_key=partition_key,
        arrival_seconds=arrival_seconds,
        data=data,
        value=data if value is None else value,
    )
