"""Kinesis for Python: read and write Amazon Kinesis Data Streams in order, without losing a record."""

from typing import TYPE_CHECKING, Any

from anabranch import errors
from anabranch._version import __version__
from anabranch.budget import Budget
from anabranch.config import Aws, CheckpointSettings, ConsumerSettings, LeaseSettings, PollingSettings, ProducerSettings
from anabranch.errors import AnabranchError
from anabranch.events import Event
from anabranch.lambda_events import deaggregate
from anabranch.policies import Retry, Stop
from anabranch.records import Attempt, Batch, Context, PutResult, Record
from anabranch.reports import ConsumerStatus, FleetStatus, FlushReport, StopReport
from anabranch.values import json_lines

if TYPE_CHECKING:
    from anabranch._engine.writing.write_thread import SyncDelivery
    from anabranch._engine.writing.writer import Delivery
    from anabranch.application import Application
    from anabranch.consumer import Consumer
    from anabranch.producer import Producer
    from anabranch.sync_producer import SyncProducer

__all__ = [
    "AnabranchError",
    "Application",
    "Attempt",
    "Aws",
    "Batch",
    "Budget",
    "CheckpointSettings",
    "Consumer",
    "ConsumerSettings",
    "ConsumerStatus",
    "Context",
    "Delivery",
    "Event",
    "FleetStatus",
    "FlushReport",
    "LeaseSettings",
    "PollingSettings",
    "Producer",
    "ProducerSettings",
    "PutResult",
    "Record",
    "Retry",
    "Stop",
    "StopReport",
    "SyncDelivery",
    "SyncProducer",
    "__version__",
    "deaggregate",
    "errors",
    "json_lines",
]

# What pulls in the engine is loaded when it is first named: `import anabranch` is quick, and needs no botocore.
_LAZY = {
    "Application": "anabranch.application",
    "Consumer": "anabranch.consumer",
    "Delivery": "anabranch._engine.writing.writer",
    "Producer": "anabranch.producer",
    "SyncDelivery": "anabranch._engine.writing.write_thread",
    "SyncProducer": "anabranch.sync_producer",
}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        import importlib  # noqa: PLC0415 -- only needed here

        value = getattr(importlib.import_module(_LAZY[name]), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
