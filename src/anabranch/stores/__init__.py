"""Lease stores: where a fleet keeps its leases, checkpoints and members."""

from anabranch.stores.memory import MemoryLeaseStore
from anabranch.stores.sqlite import SqliteLeaseStore
from anabranch.stores.urls import default_store, open_store

__all__ = ["MemoryLeaseStore", "SqliteLeaseStore", "default_store", "open_store"]
