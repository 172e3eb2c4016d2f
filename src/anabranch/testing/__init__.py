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

_HOMES = {
    "AuditReport": "anabranch.testing.auditor",
    "Auditor": "anabranch.testing.auditor",
    "ManualClock": "anabranch.testing.doubles",
    "SimulationReport": "anabranch.testing.simulation",
    "check_lease_store": "anabranch.testing.lease_store_contract",
    "make_context": "anabranch.testing.doubles",
    "make_record": "anabranch.testing.doubles",
    "simulate": "anabranch.testing.simulation",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = found
    return found
