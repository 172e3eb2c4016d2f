"""Tools to test applications that use anabranch: simulated fleets, an auditor, test doubles, pytest fixtures.

Names load on first use: pytest imports this package for its plugin in every project that has anabranch installed.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from anabranch.testing.auditor import Auditor, AuditReport
    from anabranch.testing.doubles import ManualClock, make_context, make_record
    from anabranch.testing.lease_store_contract import check_lease_store
    from anabranch.testing.simulation import SimulationReport, simulate

__all__ = [
    "AuditReport",
    "Auditor",
    "ManualClock",
    "SimulationReport",
    "check_lease_store",
    "make_context",
    "make_record",
    "simulate",
]

_NAMES = {
    "auditor": ("AuditReport", "Auditor"),
    "doubles": ("ManualClock", "make_context", "make_record"),
    "lease_store_contract": ("check_lease_store",),
    "simulation": ("SimulationReport", "simulate"),
}


def __getattr__(name: str) -> Any:
    for module, names in _NAMES.items():
        if name in names:
            return getattr(importlib.import_module(f"{__name__}.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
