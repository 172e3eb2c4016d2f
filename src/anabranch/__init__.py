"""Kinesis for Python: read and write Amazon Kinesis Data Streams in order, without losing a record."""

from anabranch._version import __version__

TYPE_CHECKING = False  # importing typing for it would take longer than all the rest

if TYPE_CHECKING:
    from typing import Any

    from anabranch import errors
    from anabranch._engine.writing.write_thread import SyncDelivery
    from anabranch._engine.writing.writer import Delivery
    from anabranch.alerts import Alert
    from anabranch.application import Application
    from anabranch.budget import Budget
    from anabranch.config import (
        Aws,
        CheckpointSettings,
        ConsumerSettings,
        FanOutSettings,
        LeaseSettings,
        PollingSettings,
        ProducerSettings,
    )
    from anabranch.consumer import Consumer
    from anabranch.dead_letters import DeadLetters
    from anabranch.errors import AnabranchError
    from anabranch.events import Event
    from anabranch.lambda_events import deaggregate
    from anabranch.policies import DeadLetter, Retry, Skip, Stop
    from anabranch.producer import Producer
    from anabranch.records import Attempt, Batch, BatchFailure, Context, PutResult, Record
    from anabranch.reports import ConsumerStatus, FleetStatus, FlushReport, StopReport
    from anabranch.sync_producer import SyncProducer
    from anabranch.values import json_lines

__all__ = [
    "Alert",
    "AnabranchError",
    "Application",
    "Attempt",
    "Aws",
    "Batch",
    "BatchFailure",
    "Budget",
    "CheckpointSettings",
    "Consumer",
    "ConsumerSettings",
    "ConsumerStatus",
    "Context",
    "DeadLetter",
    "DeadLetters",
    "Delivery",
    "Event",
    "FanOutSettings",
    "FleetStatus",
    "FlushReport",
    "LeaseSettings",
    "PollingSettings",
    "Producer",
    "ProducerSettings",
    "PutResult",
    "Record",
    "Retry",
    "Skip",
    "Stop",
    "StopReport",
    "SyncDelivery",
    "SyncProducer",
    "__version__",
    "deaggregate",
    "errors",
    "json_lines",
]

# A name is loaded when it is first used: `import anabranch` is quick, needs no botocore, and Ctrl-C soon finds the
# command line ready.
_HOMES = {
    "Alert": "alerts",
    "AnabranchError": "errors",
    "Application": "application",
    "Attempt": "records",
    "Aws": "config",
    "Batch": "records",
    "BatchFailure": "records",
    "Budget": "budget",
    "CheckpointSettings": "config",
    "Consumer": "consumer",
    "ConsumerSettings": "config",
    "ConsumerStatus": "reports",
    "Context": "records",
    "DeadLetter": "policies",
    "DeadLetters": "dead_letters",
    "Delivery": "_engine.writing.writer",
    "Event": "events",
    "FanOutSettings": "config",
    "FleetStatus": "reports",
    "FlushReport": "reports",
    "LeaseSettings": "config",
    "PollingSettings": "config",
    "Producer": "producer",
    "ProducerSettings": "config",
    "PutResult": "records",
    "Record": "records",
    "Retry": "policies",
    "Skip": "policies",
    "Stop": "policies",
    "StopReport": "reports",
    "SyncDelivery": "_engine.writing.write_thread",
    "SyncProducer": "sync_producer",
    "deaggregate": "lambda_events",
    "json_lines": "values",
}
_MODULES = (
    "alerts",
    "config",
    "errors",
    "events",
    "health",
    "lambda_events",
    "letters",
    "limits",
    "logs",
    "measures",
    "metrics",
    "policies",
    "records",
    "reports",
    "values",
)


def __getattr__(name: str) -> "Any":
    import importlib  # noqa: PLC0415 -- only needed here

    if name in _MODULES:
        return importlib.import_module(f"anabranch.{name}")
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"anabranch.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_MODULES})
