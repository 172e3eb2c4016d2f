"""Tools to test what is built with anabranch: simulated fleets, checkers, the local Kinesis as a pytest fixture.

Names are loaded when they are first used: pytest imports this package for its plugin in every project that has
anabranch installed, and must not pay for the rest.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from anabranch.testing.auditor import Auditor, AuditReport
    from anabranch.testing.clock import ManualClock
    from anabranch.testing.lease_store_contract import check_lease_store
    from anabranch.testing.make_record import make_record
    from anabranch.testing.simulation import SimulationReport, simulate

__all__ = [
    "AuditReport",
    "Auditor",
    "ManualClock",
    "SimulationReport",
    "check_lease_store",
    "make_record",
    "simulate",
]

_HOMES = {
    "AuditReport": "anabranch.testing.auditor",
    "Auditor": "anabranch.testing.auditor",
    "ManualClock": "anabranch.testing.clock",
    "SimulationReport": "anabranch.testing.simulation",
    "check_lease_store": "anabranch.testing.lease_store_contract",
    "make_record": "anabranch.testing.make_record",
    "simulate": "anabranch.testing.simulation",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = found  # a function and its module may share a name: the function stays
    return found
