"""The one table from AWS's error codes to our error tree, and the advice that goes with the errors a newcomer meets
first.

A code that is not in the table is judged by its HTTP status. Request ids are kept: they are what AWS's support asks
for.
"""

from typing import Final

from anabranch._wire.bodies import AwsError
from anabranch.errors import (
    AccessDeniedError,
    ExpiredIteratorError,
    ExpiredTokenError,
    InvalidRequestError,
    ResourceInUseError,
    ServiceError,
    StreamNotFoundError,
    ThrottledError,
    UnavailableError,
)

__all__ = ["CLOCK_CODES", "TOKEN_CODES", "service_error"]

_CODES: Final[dict[str, type[ServiceError]]] = {
    # over a quota, of the shard, the account or the key
    "KMSThrottlingException": ThrottledError,
    "LimitExceededException": ThrottledError,
    "ProvisionedThroughputExceededException": ThrottledError,
    "RequestLimitExceeded": ThrottledError,
    "SlowDown": ThrottledError,
    "Throttling": ThrottledError,
    "ThrottlingException": ThrottledError,
    "ThrottledException": ThrottledError,
    "TooManyRequestsException": ThrottledError,
    # failed inside
    "InternalFailure": UnavailableError,
    "InternalFailureException": UnavailableError,
    "InternalServerError": UnavailableError,
    "InternalServiceError": UnavailableError,
    "ServiceUnavailable": UnavailableError,
    "ServiceUnavailableException": UnavailableError,
    # older than five minutes
    "ExpiredIteratorException": ExpiredIteratorError,
    "ExpiredNextTokenException": ExpiredIteratorError,
    # credentials or clock
    "ExpiredToken": ExpiredTokenError,
    "ExpiredTokenException": ExpiredTokenError,
    "RequestExpired": ExpiredTokenError,
    "RequestInTheFuture": ExpiredTokenError,
    "RequestTimeTooSkewed": ExpiredTokenError,
    # changing, or taken
    "ResourceInUseException": ResourceInUseError,
    # not allowed
    "AccessDenied": AccessDeniedError,
    "AccessDeniedException": AccessDeniedError,
    "IncompleteSignature": AccessDeniedError,
    "IncompleteSignatureException": AccessDeniedError,
    "InvalidClientTokenId": AccessDeniedError,
    "InvalidSignatureException": AccessDeniedError,
    "KMSAccessDeniedException": AccessDeniedError,
    "KMSDisabledException": AccessDeniedError,
    "KMSInvalidStateException": AccessDeniedError,
    "KMSNotFoundException": AccessDeniedError,
    "KMSOptInRequired": AccessDeniedError,
    "MissingAuthenticationToken": AccessDeniedError,
    "MissingAuthenticationTokenException": AccessDeniedError,
    "OptInRequired": AccessDeniedError,
    "SignatureDoesNotMatch": AccessDeniedError,
    "UnrecognizedClientException": AccessDeniedError,
    # not there
    "ResourceNotFoundException": StreamNotFoundError,
    # not understood
    "InvalidArgumentException": InvalidRequestError,
    "SerializationException": InvalidRequestError,
    "UnknownOperationException": InvalidRequestError,
    "ValidationException": InvalidRequestError,
}

CLOCK_CODES: Final = frozenset(
    {
        "InvalidSignatureException",
        "RequestExpired",
        "RequestInTheFuture",
        "RequestTimeTooSkewed",
        "SignatureDoesNotMatch",
    }
)
"""What a clock that is wrong may be answered with."""

TOKEN_CODES: Final = frozenset({"ExpiredToken", "ExpiredTokenException"})
"""What other credentials mend."""

_RENEW: Final = "renew them (aws sso login, a new session token), or let a profile or a role do so"
_ADVICE: Final = {
    "ExpiredToken": _RENEW,
    "ExpiredTokenException": _RENEW,
    "InvalidClientTokenId": "is the access key still active, and of this AWS partition?",
    "InvalidSignatureException": "does the secret belong to the access key, and is this machine's clock right?",
    "SignatureDoesNotMatch": "does the secret belong to the access key, and is this machine's clock right?",
    "UnrecognizedClientException": "is the access key still active, and of this AWS partition?",
}


def service_error(
    operation: str,
    error: AwsError,
    *,
    status: int,
    request_id: str | None = None,
    region: str | None = None,
    retry_after_seconds: float | None = None,
) -> ServiceError:
    code = error.code or f"HTTP {status}"
    kind = _kind(code, error.message, status)
    message = error.message
    advice = _ADVICE.get(code)
    if kind is StreamNotFoundError and region is not None:
        advice = f"looked for in {region}: is that its region, and is this its account?"
    if advice:
        message = f"{message} ({advice})" if message else advice
    return kind(
        message,
        operation=operation,
        code=code,
        status=status,
        request_id=request_id,
        retry_after_seconds=retry_after_seconds,
    )


def _kind(code: str, message: str, status: int) -> type[ServiceError]:
    if message.startswith(("Signature expired", "Signature not yet current")):
        return ExpiredTokenError  # one code for two causes: a wrong clock here, a wrong secret otherwise
    known = _CODES.get(code)
    if known is not None:
        return known
    if status >= 500 or status == 408:
        return UnavailableError
    if status == 429:
        return ThrottledError
    if status in {401, 403, 407}:
        return AccessDeniedError
    return InvalidRequestError
