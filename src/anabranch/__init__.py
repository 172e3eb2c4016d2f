"""Kinesis for Python: read and write Amazon Kinesis Data Streams in order, without losing a record."""

from typing import TYPE_CHECKING, Any

from anabranch import errors
from anabranch._version import __version__
from anabranch.budget import Budget
from anabranch.config import Aws, CheckpointSettings, ConsumerSettings, LeaseSettings, PollingSettings, ProducerSettings
from anabranch.errors import AnabranchError
from anabranch.events import Event
from anabranch.policies import Retry, Stop
from anabranch.records import Attempt, Batch, Context, PutResult, Record
from anabranch.reports import ConsumerStatus, StopReport
from anabranch.values import json_lines

if TYPE_CHECKING:
    from anabranch.consumer import Consumer
    from anabranch.producer import Producer

__all__ = [
    "AnabranchError",
    "Attempt",
    "Aws",
    "Batch",
    "Budget",
    "CheckpointSettings",
    "Consumer",
    "ConsumerSettings",
    "ConsumerStatus",
    "Context",
    "Event",
    "LeaseSettings",
    "PollingSettings",
    "Producer",
    "ProducerSettings",
    "PutResult",
    "Record",
    "Retry",
    "Stop",
    "StopReport",
    "__version__",
    "errors",
    "json_lines",
]

# What pulls in the engine is loaded when it is first named: `import anabranch` is quick, and needs no botocore.
_LAZY = {"Consumer": "anabranch.consumer", "Producer": "anabranch.producer"}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        import importlib  # noqa: PLC0415 -- only needed here

        value = getattr(importlib.import_module(_LAZY[name]), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
