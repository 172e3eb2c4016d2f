"""What follows a failed handler call: one decision, made from the policy, the work and the error.

A record is tried again, or gets the policy's last step: its shard stops there, it is skipped, or it goes to the dead
letters. A payload that does not decode gets the last step at once. If too many records are skipped or dead-lettered, it
looks like an outage, and the shard stops instead (rule D9).
"""

from collections import deque
from collections.abc import Sequence
from typing import Final, TypeAlias

import msgspec

from anabranch._core.backoff import retry_pause_ms
from anabranch._model.entropy import Entropy
from anabranch.policies import DeadLetter, Retry, Skip, Stop
from anabranch.reasons import LooksLikeOutage, Reason, StoppedByHandler, StoppedByPayload
from anabranch.records import BatchFailure, Record

CHARACTERS_MAX: Final = 1_000
IN_A_ROW_MAX: Final = 20
SKIPPED_PER_MINUTE_MAX: Final = 100
MINUTE_MS: Final = 60_000


class UndecodableError(Exception):
    """A record does not decode. `cause` is what the decoder raised."""

    def __init__(self, record: Record[bytes], cause: Exception) -> None:
        super().__init__(f"record {record.position} does not decode")
        self.record = record
        self.cause = cause


class RetryAt(msgspec.Struct, frozen=True):
    """Call the handler again at this time."""

    at_ms: int
    pause_ms: int
    halve: bool
    """The batch is not tried whole again."""


class StopShard(msgspec.Struct, frozen=True):
    """Stop the shard at the record."""

    reason: Reason


class SkipRecord(msgspec.Struct, frozen=True):
    """Go on without the record."""


class WriteLetter(msgspec.Struct, frozen=True):
    """Write the record to the dead letters, then go on (rule D1)."""


LastStep: TypeAlias = StopShard | SkipRecord | WriteLetter
Decision: TypeAlias = RetryAt | LastStep


class OutageGuard:
    """Tells an outage from bad records: counts the records of one shard that are skipped or dead-lettered (rule D9)."""

    def __init__(self) -> None:
        self._at_ms: deque[int] = deque()
        self._in_a_row = 0
        self._success_count = 0

    def symptom(self, now_ms: int, per_minute: int, success_count: int) -> tuple[int, bool] | None:
        """Counts one more record. `success_count` grows with every record that is handled. If it looks like an outage,
        returns how many records failed, and whether in a row or within a minute; this one is not counted then.
        """
        if success_count != self._success_count:
            self._success_count, self._in_a_row = success_count, 0
        while self._at_ms and now_ms - self._at_ms[0] >= MINUTE_MS:
            self._at_ms.popleft()
        if self._in_a_row >= IN_A_ROW_MAX:
            return IN_A_ROW_MAX, True
        if len(self._at_ms) >= per_minute:
            return per_minute, False
        self._at_ms.append(now_ms)
        self._in_a_row += 1
        return None


class Situation(msgspec.Struct, frozen=True):
    """What a decision depends on besides the policy and the error."""

    now_ms: int
    outage: OutageGuard
    success_count: int
    """Records of the shard that were handled so far."""
    service_seconds: float | None
    """The service's clock (rule D8); None before its first answer."""


def decide(
    policy: Retry,
    error: BaseException,
    records: Sequence[Record[bytes]],
    situation: Situation,
    *,
    attempts: int,
    entropy: Entropy,
) -> Decision:
    """`attempts` includes the call that just failed. A batch is retried until one record fails alone (rule D11)."""
    record, gives_up = records[0], isinstance(error, policy.give_up_on) or _is_too_old(policy, records[0], situation)
    if len(records) > 1 or not (gives_up or attempts >= policy.attempts):
        pause_ms = retry_pause_ms(policy, attempts, entropy)
        return RetryAt(situation.now_ms + pause_ms, pause_ms, halve=gives_up)
    stop = StoppedByHandler(
        position=str(record.position),
        partition_key=record.partition_key,
        attempts=attempts,
        error=error_text(error),
    )
    return last_step(policy, stop, situation)


def _is_too_old(policy: Retry, record: Record[bytes], situation: Situation) -> bool:
    now_seconds = situation.service_seconds
    if policy.max_age is None or now_seconds is None:
        return False
    return now_seconds - record.arrival_seconds > policy.max_age


def last_step(policy: Retry, stop: StoppedByHandler | StoppedByPayload, situation: Situation) -> LastStep:
    """What follows the last attempt. `stop` is the reason if the shard stops."""
    then = policy.then
    if isinstance(then, Stop):
        return StopShard(stop)
    per_minute = then.per_minute if isinstance(then, DeadLetter) else SKIPPED_PER_MINUTE_MAX
    symptom = situation.outage.symptom(situation.now_ms, per_minute, situation.success_count)
    if symptom is not None:
        count, in_a_row = symptom
        outage = LooksLikeOutage(
            position=stop.position,
            partition_key=stop.partition_key,
            record_count=count,
            in_a_row=in_a_row,
            error=stop.error,
        )
        return StopShard(outage)
    return SkipRecord() if isinstance(then, Skip) else WriteLetter()


def root_error(error: BaseException) -> BaseException:
    """The error to report: of `raise BatchFailure(...) from error`, which only names the records, the cause."""
    cause = error.__cause__
    if not isinstance(error, BatchFailure) or cause is None or type(cause).__name__ == "_RemoteTraceback":
        return error  # a traceback from another process, as text, is not a cause
    return cause


def first_failed(records: Sequence[Record[bytes]], failure: BatchFailure) -> int:
    """The index of the first record that the handler reported (rule D2); 0 if it reported none of these records."""
    failed = {record.position for record in failure.failed}
    return next((number for number, record in enumerate(records) if record.position in failed), 0)


def undecodable(policy: Retry, error: UndecodableError, situation: Situation) -> LastStep:
    """What follows a payload that does not decode: never a retry, because the next attempt would fail, too."""
    record, cause = error.record, error_text(error.cause)
    stop = StoppedByPayload(position=str(record.position), partition_key=record.partition_key, error=cause)
    return last_step(policy, stop, situation)


def error_text(error: BaseException) -> str:
    """The error as text that every store accepts: bounded, and valid Unicode. Handlers can raise anything."""
    name = type(error).__name__
    try:
        text = str(error)
    except Exception:  # noqa: BLE001 -- its __str__ is user code
        return name
    text = text[:CHARACTERS_MAX].encode("utf-8", "backslashreplace").decode()
    return f"{name}: {text}" if text else name
