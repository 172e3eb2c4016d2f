"""Shard-level metrics of a stream: which ones are on. None is measured here."""

from collections.abc import Iterable
from typing import Any, Final

from anabranch.local.shapes import METRICS, NAMED_STREAM, StructureShape
from anabranch.local.state.account import Account
from anabranch.local.state.stream import Stream

__all__ = ["MONITORING_REQUEST", "expand_metrics", "set_metrics"]

MONITORING_REQUEST = StructureShape({**NAMED_STREAM, "ShardLevelMetrics": METRICS}, required=("ShardLevelMetrics",))

_ALL: Final = (
    "IncomingBytes",
    "IncomingRecords",
    "IteratorAgeMilliseconds",
    "OutgoingBytes",
    "OutgoingRecords",
    "ReadProvisionedThroughputExceeded",
    "WriteProvisionedThroughputExceeded",
)


def expand_metrics(names: Iterable[str]) -> set[str]:
    chosen = set(names)
    return set(_ALL) if "ALL" in chosen else chosen


def set_metrics(account: Account, stream: Stream, metrics: set[str], now_ms: int) -> dict[str, Any]:
    before = list(stream.metrics)
    stream.metrics = [name for name in _ALL if name in metrics]
    account.update_stream(stream, now_ms)
    return {
        "StreamName": stream.name,
        "CurrentShardLevelMetrics": before,
        "DesiredShardLevelMetrics": list(stream.metrics),
        "StreamARN": stream.arn,
    }
