"""How records are handled, as the user said it: in what order, how many at once, decoded how, and what after a failure.

A record is decoded when it is handed out, and again for each attempt. `decode` is None where the value is the data
itself, which then costs nothing. A payload that does not decode will not decode next time either, so it is never
retried: its shard stops there.
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
    """A record does not decode; what the decoder raised is its cause."""

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
            self.decode = _record_decoder(decode)

    def decode_leading(self, records: list[Record[bytes]]) -> tuple[list[Record[Any]], UndecodableError | None]:
        """The records before the first one that does not decode, and the error of that one. The list is a copy: the
        handler may change it.
        """
        decode = self.decode
        if decode is None:
            return records.copy(), None
        decoded: list[Record[Any]] = []
        try:
            for record in records:
                decoded.append(decode(record))  # noqa: PERF401 -- what was decoded before an error counts
        except UndecodableError as error:
            return decoded, error
        return decoded, None


def _record_decoder(decode: Callable[[bytes], Any]) -> Callable[[Record[bytes]], Record[Any]]:
    def decode_record(record: Record[bytes]) -> Record[Any]:
        try:
            return replace(record, value=decode(record.data))
        except Exception as error:
            raise UndecodableError(record, error) from error

    return decode_record
