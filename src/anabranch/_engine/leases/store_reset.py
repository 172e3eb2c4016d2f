"""The end of a worker whose application is gone from the lease store: nothing is made in its place (rule L14)."""

from anabranch._engine.ports import Ports
from anabranch._model.leases import AppRow
from anabranch.errors import LeaseStoreInvalidError
from anabranch.events import StoreReset

__all__ = ["store_reset"]


def store_reset(ports: Ports, app: AppRow) -> LeaseStoreInvalidError:
    """Tells of it; the error is to be raised."""
    ports.emit(StoreReset())
    return LeaseStoreInvalidError(
        f"the lease store no longer holds application {app.app!r} as this worker knows it: it was "
        "emptied, restored or replaced. Nothing was created in its place; check the store, then start again."
    )
