"""How records are handled, as the user said it: in what order, how many at once, decoded how, and what after a failure.

A record is decoded when it is handed out, one that is tried again anew. `decode` is None where the value is the data
itself, which then costs nothing.
"""

from collections.abc import Callable
from typing import Any, TypeAlias

from msgspec.structs import replace

from anabranch._model.leases import OrderMode
from anabranch.policies import Retry
from anabranch.records import Record

__all__ = ["Decode", "Handling", "UndecodableError"]

Decode: TypeAlias = Callable[[Record[bytes]], Record[Any]] | None


class UndecodableError(Exception):
    """One record of several does not decode; what the decoder raised is its cause."""

    def __init__(self, record: Record[bytes], cause: Exception) -> None:
        super().__init__(f"record {record.position} does not decode")
        self.record = record
        self.cause = cause


class Handling:
    def __init__(
        self, *, order: OrderMode, concurrency: int, decode: Callable[[bytes], Any] | None, policy: Retry
    ) -> None:
        self.order: OrderMode = order
        self.concurrency = concurrency
        self.policy = policy
        self.decode: Decode = None
        if decode is not None:
            self.decode = lambda record: replace(record, value=decode(record.data))

    def decode_all(self, records: list[Record[bytes]]) -> list[Record[Any]]:
        """A list of its own: what becomes of it in the handler's hands changes nothing here."""
        decode = self.decode
        if decode is None:
            return records.copy()
        decoded: list[Record[Any]] = []
        for record in records:
            try:
                decoded.append(decode(record))
            except Exception as error:
                raise UndecodableError(record, error) from error
        return decoded
