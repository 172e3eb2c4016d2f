"""Everything that anabranch raises on purpose.

    AnabranchError                       base of all; `.retryable` says whether the same call may succeed later
    ├── ConfigurationError               a setting is wrong; every violation is listed at once
    ├── UsageError                       the call does not fit the object's state (closed producer, second iterator)
    ├── CodecError                       invalid bytes; nothing of them was used
    ├── TransportError                   retryable: no usable answer (connect, TLS, timeout, invalid answer)
    ├── CredentialsError                 no usable credentials or region; the message says where we looked
    ├── ServiceError                     the service answered with an error: .operation .code .status .request_id
    │   ├── ThrottledError               retryable: over a quota
    │   ├── UnavailableError             retryable: 5xx, internal failure
    │   ├── ExpiredIteratorError         retryable with a new iterator
    │   ├── ExpiredTokenError            retryable with fresh credentials, or a corrected clock
    │   ├── ResourceInUseError           retryable: the stream or consumer is changing, or the subscription is taken
    │   ├── AccessDeniedError            IAM or KMS refused the call
    │   ├── StreamNotFoundError          no such stream, shard or consumer in this account and region
    │   └── InvalidRequestError          the service did not accept the request's content
    ├── StreamError                      the stream is not the one that this application was reading
    │   ├── StreamDeletedError           it was deleted
    │   └── StreamRecreatedError         it was deleted and created again
    ├── LeaseError                       a problem with leases or their store
    │   ├── LeaseStoreError              retryable: the store did not answer, or the call failed; .code .advice
    │   ├── LeaseStoreInvalidError       the store cannot be used: no database, wrong schema, ...; .code .advice
    │   └── FleetMismatchError           this worker's `order=` or version does not fit the running fleet
    ├── DeadLetterError                  a dead letter was not written or read; .code .advice, and .retryable by code
    ├── FanOutError                      fan-out cannot be used: the stream has as many consumers as it may have
    ├── ShardStoppedError                a run ended with a shard stopped at a record; .report names it
    ├── ConsumerFailedError              a background task failed unexpectedly; __cause__ is the error
    └── ProducerError                    the producer failed, or its thread could not be started
        ├── BufferFull                   retryable: the producer's buffer is full
        └── DeliveryFailed               records were not delivered; .results has each of them with all attempts

Lost races and results of single records are values, and not raised. A class's docstring is its default message.
"""

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, cast

if TYPE_CHECKING:
    from anabranch.reports import StopReport


class AnabranchError(Exception):
    """Something went wrong in anabranch."""

    retryable: bool = False

    def __init__(self, message: str | None = None) -> None:
        super().__init__(message or (type(self).__doc__ or "").strip())


class ConfigurationError(AnabranchError, ValueError):
    """A setting is wrong."""

    def __init__(self, violations: str | Sequence[str]) -> None:
        self.violations: tuple[str, ...] = (violations,) if isinstance(violations, str) else tuple(violations)
        super().__init__("; ".join(self.violations))


class UsageError(AnabranchError):
    """The call does not fit the state of the object."""


class CodecError(AnabranchError, ValueError):
    """The bytes are invalid."""


class TransportError(AnabranchError):
    """The service gave no usable answer."""

    retryable = True

    def __init__(self, message: str | None = None, *, maybe_sent: bool = True) -> None:
        super().__init__(message)
        self.maybe_sent = maybe_sent
        """False only if the service certainly never saw the request."""


class CredentialsError(AnabranchError):
    """No usable AWS credentials or region were found."""


class ServiceError(AnabranchError):
    """The service answered with an error."""

    def __init__(
        self,
        message: str,
        *,
        operation: str,
        code: str,
        status: int = 400,
        request_id: str | None = None,
        retry_after_seconds: float | None = None,
    ) -> None:
        details = f": {message}" if message else ""
        request = f" (request id {request_id})" if request_id else ""
        super().__init__(f"{operation}: {code}{details}{request}")
        self.message = message
        self.operation = operation
        self.code = code
        self.status = status
        self.request_id = request_id
        self.retry_after_seconds = retry_after_seconds
        """How long the service asked to wait, if it did."""

    def __reduce__(self) -> tuple[Any, ...]:
        made = partial(type(self), operation=self.operation, code=self.code, request_id=self.request_id)
        return made, (self.message,), vars(self)


class ThrottledError(ServiceError):
    """The call went over a quota."""

    retryable = True


class UnavailableError(ServiceError):
    """The service had an internal failure."""

    retryable = True


class ExpiredIteratorError(ServiceError):
    """The shard iterator is older than five minutes."""

    retryable = True


class ExpiredTokenError(ServiceError):
    """The credentials or the signature have expired."""

    retryable = True


class ResourceInUseError(ServiceError):
    """The stream or consumer is changing, or the subscription is taken."""

    retryable = True


class AccessDeniedError(ServiceError):
    """IAM or KMS refused the call."""


class StreamNotFoundError(ServiceError):
    """There is no such stream, shard or consumer in this account and region."""


class InvalidRequestError(ServiceError):
    """The service did not accept the content of the request."""


class StreamError(AnabranchError):
    """The stream is not the one this application was reading."""


class StreamDeletedError(StreamError):
    """The stream was deleted while this application was reading it."""


class StreamRecreatedError(StreamError):
    """The stream was deleted and created again while this application was reading it."""


class LeaseError(AnabranchError):
    """Something went wrong with a lease."""


LeaseStoreCode = Literal["no_answer", "throttled", "table_creating", "access_denied", "clock_skew"]
"""Why a lease store call failed. `no_answer` is everything without a code of its own."""

LeaseStoreInvalidCode = Literal[
    "unusable",
    "access_denied",
    "table_missing",
    "table_deleting",
    "wrong_key_schema",
    "kcl_table",
    "other_region",
    "moved",
    "half_deleted",
    "not_durable",
    "bucket_missing",
    "conditions_ignored",
    "taken_over",
]
"""Why a lease store cannot be used."""


class LeaseStoreError(LeaseError):
    """The lease store call failed."""

    retryable = True

    def __init__(
        self, message: str | None = None, *, code: LeaseStoreCode = "no_answer", advice: str | None = None
    ) -> None:
        super().__init__(f"{message}: {advice}" if advice else message)
        self.code: LeaseStoreCode = code
        self.advice = advice


class LeaseStoreInvalidError(LeaseError):
    """The lease store cannot be used as it is."""

    def __init__(
        self, message: str | None = None, *, code: LeaseStoreInvalidCode = "unusable", advice: str | None = None
    ) -> None:
        super().__init__(f"{message}: {advice}" if advice else message)
        self.code: LeaseStoreInvalidCode = code
        self.advice = advice


class FleetMismatchError(LeaseError):
    """This worker's `order=` or version does not fit the running fleet."""


DeadLetterCode = Literal["no_answer", "throttled", "access_denied", "missing", "too_large", "locked", "unusable"]
"""Why a dead letter was not written or read."""


class DeadLetterError(AnabranchError):
    """The dead letter destination failed."""

    def __init__(
        self, message: str | None = None, *, code: DeadLetterCode = "no_answer", advice: str | None = None
    ) -> None:
        super().__init__(f"{message}: {advice}" if advice else message)
        self.code: DeadLetterCode = code
        """`no_answer`, `throttled`, `access_denied`, `missing` (no such queue, stream, bucket or folder), `too_large`,
        `locked` (another process redrives) or `unusable`."""
        self.advice = advice
        self.retryable = code in {"no_answer", "throttled", "locked"}


class FanOutError(AnabranchError):
    """Enhanced fan-out cannot be used."""


class ShardStoppedError(AnabranchError):
    """The run ended while one of its shards was stopped at a record."""

    def __init__(self, message: str | None = None, *, report: "StopReport | None" = None) -> None:
        super().__init__(message)
        self.report = cast("StopReport", report)  # None only until an unpickled error gets its attributes
        """How the run ended; `report.stopped` has each shard with its record and error."""


class ConsumerFailedError(AnabranchError):
    """A part of the consumer failed unexpectedly."""


class ProducerError(AnabranchError):
    """Something went wrong while writing."""


class BufferFull(ProducerError):  # noqa: N818 -- like the standard library's queue.Full
    """The producer's buffer is full."""

    retryable = True


class DeliveryFailed(ProducerError):  # noqa: N818 -- a result that is raised only on request
    """A record was not delivered."""

    def __init__(self, message: str | None = None, *, results: Sequence[Any] = ()) -> None:
        super().__init__(message)
        self.results: tuple[Any, ...] = tuple(results)
        """One PutResult for each record that was not delivered."""

    @property
    def result(self) -> Any:
        return self.results[0] if self.results else None
