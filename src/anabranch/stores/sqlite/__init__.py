"""Leases in a SQLite file: the embedded default, shared by the processes of one machine."""

from anabranch.stores.sqlite.store import SqliteLeaseStore

__all__ = ["SqliteLeaseStore"]
