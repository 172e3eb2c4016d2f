"""Tools to test what is built with anabranch: simulated fleets, checkers, the local Kinesis as a pytest fixture.

Names are loaded when they are first used: pytest imports this package for its plugin in every project that has
anabranch installed, and must not pay for the rest.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from anabranch.testing.auditor import Auditor, AuditReport
    from anabranch.testing.lease_store_contract import check_lease_store

__all__ = ["AuditReport", "Auditor", "check_lease_store"]

_HOMES = {
    "AuditReport": "anabranch.testing.auditor",
    "Auditor": "anabranch.testing.auditor",
    "check_lease_store": "anabranch.testing.lease_store_contract",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
