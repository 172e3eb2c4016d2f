"""The promise of a producer as a checker: every record that was put has one outcome, and the stream agrees with it."""

from anabranch._model.streams import Position
from anabranch.records import PutResult
from anabranch.testing.journal import Violation


class WriteOutcomes:
    """P6: every record that was put has one outcome, and a consumer's view of the stream agrees with it.

    Delivered: the record is at the reported position. Failed or refused: the stream has no copy. Maybe written: the
    stream may have copies, and the outcome lists the attempts. Where order is kept, the first copies of a key's
    delivered records are in the order of their puts.

    Call `put` for each put, `told` for each outcome, and finally `read` for each record of the stream in the order in
    which a consumer gets it. Records are identified by their data, so each put needs unique data.
    """

    promise = "one outcome"

    def __init__(self, *, keeps_order: bool) -> None:
        self.violations: list[Violation] = []
        self._keeps_order = keeps_order
        self._partition_keys: dict[bytes, str] = {}
        """By data, in the order of the puts."""
        self._refused: dict[bytes, str] = {}
        self._results: dict[bytes, PutResult] = {}
        self._copies: dict[bytes, list[tuple[str, Position]]] = {}
        self._first_places: dict[bytes, int] = {}

    def put(self, data: bytes, partition_key: str) -> None:
        assert data not in self._partition_keys, "two puts have the same data"
        self._partition_keys[data] = partition_key

    def refused(self, data: bytes) -> None:
        """The put itself raised: there is no outcome, and the stream has no copy."""
        self._refused[data] = self._partition_keys.pop(data)

    def told(self, at_ms: int, result: PutResult) -> None:
        if result.data in self._results:
            self._complain(at_ms, result.data, "has two outcomes")
        self._results[result.data] = result

    def read(self, data: bytes, shard_id: str, position: Position) -> None:
        self._first_places.setdefault(data, len(self._first_places))
        self._copies.setdefault(data, []).append((shard_id, position))

    def ended(self, at_ms: int) -> None:
        """All outcomes and all records of the stream are known."""
        for data in self._partition_keys:
            if (problem := self._problem(data)) is not None:
                self._complain(at_ms, data, problem)
        for data in self._refused:
            if data in self._copies:
                self._complain(at_ms, data, f"was refused, but is at {self._copies[data]}")
        if self._keeps_order:
            self._check_order(at_ms)

    def _problem(self, data: bytes) -> str | None:
        result, copies = self._results.get(data), self._copies.get(data, [])
        if result is None:
            return "has no outcome"
        if result.delivered:
            assert result.shard_id is not None
            assert result.sequence_number is not None
            place = (result.shard_id, Position(int(result.sequence_number), result.sub_sequence_number))
            if place not in copies:
                return f"was reported at {place}, but is at {copies}"
            return None if result.attempts[-1].code is None else "is delivered by an attempt that failed"
        if not result.maybe_written:
            return f"was reported as failed, but is at {copies}" if copies else None
        return None if result.attempts else "is maybe written, but was never tried"

    def _check_order(self, at_ms: int) -> None:
        latest: dict[str, bytes] = {}
        for data, partition_key in self._partition_keys.items():
            result = self._results.get(data)
            if result is None or not result.delivered or data not in self._first_places:
                continue
            if result.explicit_hash_key is not None:  # may have gone to another shard than its key's
                continue
            before = latest.get(partition_key)
            if before is not None and self._first_places[data] < self._first_places[before]:
                self._complain(at_ms, data, f"is in the stream before {before[:20]!r} of its key, which was put first")
            latest[partition_key] = data

    def _complain(self, at_ms: int, data: bytes, what: str) -> None:
        self.violations.append(Violation(at_ms, self.promise, f"{data[:20]!r} {what}"))
