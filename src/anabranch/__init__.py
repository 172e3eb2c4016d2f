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
_NAMES_OF = {
    "_engine.writing.write_thread": ("SyncDelivery",),
    "_engine.writing.writer": ("Delivery",),
    "alerts": ("Alert",),
    "application": ("Application",),
    "budget": ("Budget",),
    "config": (
        "Aws",
        "CheckpointSettings",
        "ConsumerSettings",
        "FanOutSettings",
        "LeaseSettings",
        "PollingSettings",
        "ProducerSettings",
    ),
    "consumer": ("Consumer",),
    "dead_letters": ("DeadLetters",),
    "errors": ("AnabranchError",),
    "events": ("Event",),
    "health": (),
    "lambda_events": ("deaggregate",),
    "letters": (),
    "limits": (),
    "logs": (),
    "measures": (),
    "metrics": (),
    "policies": ("DeadLetter", "Retry", "Skip", "Stop"),
    "producer": ("Producer",),
    "records": ("Attempt", "Batch", "BatchFailure", "Context", "PutResult", "Record"),
    "reports": ("ConsumerStatus", "FleetStatus", "FlushReport", "StopReport"),
    "sync_producer": ("SyncProducer",),
    "values": ("json_lines",),
}


def __getattr__(name: str) -> "Any":
    import importlib  # noqa: PLC0415 -- only needed here

    if name in _NAMES_OF:
        return importlib.import_module(f"anabranch.{name}")
    for module, names in _NAMES_OF.items():
        if name in names:
            value = getattr(importlib.import_module(f"anabranch.{module}"), name)
            globals()[name] = value
            return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *filter(str.isidentifier, _NAMES_OF)})
