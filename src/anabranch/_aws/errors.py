"""Maps AWS error codes to our error classes, with advice for the errors that new users meet first.

An unknown code is classified by its HTTP status. Errors keep the request id: AWS support asks for it.
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

_CODES_BY_CLASS: Final[dict[type[ServiceError], tuple[str, ...]]] = {
    # over a quota of the shard, the account or the KMS key
    ThrottledError: (
        "KMSThrottlingException", "KmsThrottled", "LimitExceededException", "OverLimit",
        "ProvisionedThroughputExceededException", "RequestLimitExceeded", "RequestThrottled", "SlowDown",
        "ThrottledException", "Throttling", "ThrottlingException",
        "TooManyRequestsException",
    ),
    # failures inside the service
    UnavailableError: (
        "InternalFailure", "InternalFailureException", "InternalServerError", "InternalServiceError",
        "ReplicatedWriteConflictException", "ServiceUnavailable", "ServiceUnavailableException",
    ),
    # an iterator or a pagination token older than five minutes
    ExpiredIteratorError: ("ExpiredIteratorException", "ExpiredNextTokenException"),
    # expired credentials, or a wrong local clock
    ExpiredTokenError: (
        "ExpiredToken", "ExpiredTokenException", "RequestExpired", "RequestInTheFuture", "RequestTimeTooSkewed",
    ),
    # the stream, consumer or table is being changed, or exists already
    ResourceInUseError: ("ResourceInUseException", "TransactionConflictException"),
    # credentials, signature, permissions or KMS key
    AccessDeniedError: (
        "AccessDenied", "AccessDeniedException", "IncompleteSignature", "IncompleteSignatureException",
        "InvalidClientTokenId", "InvalidSignatureException", "KMSAccessDeniedException", "KMSDisabledException",
        "KMSInvalidStateException", "KMSNotFoundException", "KMSOptInRequired", "MissingAuthenticationToken",
        "MissingAuthenticationTokenException", "OptInRequired", "SignatureDoesNotMatch", "UnrecognizedClientException",
    ),
    StreamNotFoundError: ("ResourceNotFoundException",),
    InvalidRequestError: (
        "InvalidArgumentException", "SerializationException", "UnknownOperationException", "ValidationException",
    ),
}  # fmt: skip
_CODES: Final = {code: error_class for error_class, codes in _CODES_BY_CLASS.items() for code in codes}

CLOCK_CODES: Final = frozenset(
    {
        "InvalidSignatureException", "RequestExpired", "RequestInTheFuture", "RequestTimeTooSkewed",
        "SignatureDoesNotMatch",
    }
)  # fmt: skip
"""Codes that a wrong local clock can cause."""

TOKEN_CODES: Final = frozenset({"ExpiredToken", "ExpiredTokenException"})
"""Codes that new credentials fix."""

_CHECK_ACCESS_KEY: Final = "check that the access key is active and belongs to this AWS partition"
_CHECK_SIGNATURE: Final = "check that the secret key belongs to the access key, and that the local clock is right"
_RENEW: Final = "renew the credentials (aws sso login, a new session token), or use a profile or role that renews them"
_ADVICE: Final = {
    "ExpiredToken": _RENEW,
    "ExpiredTokenException": _RENEW,
    "InvalidClientTokenId": _CHECK_ACCESS_KEY,
    "InvalidSignatureException": _CHECK_SIGNATURE,
    "SignatureDoesNotMatch": _CHECK_SIGNATURE,
    "UnrecognizedClientException": _CHECK_ACCESS_KEY,
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
    error_class = _error_class(code, error.message, status)
    message = error.message
    advice = _ADVICE.get(code)
    if error_class is StreamNotFoundError and region is not None:
        advice = f"searched in {region}: check the name, the region and the account"
    if advice:
        message = f"{message.rstrip('. ')} ({advice})" if message else advice
    return error_class(
        message,
        operation=operation,
        code=code,
        status=status,
        request_id=request_id,
        retry_after_seconds=retry_after_seconds,
    )


def _error_class(code: str, message: str, status: int) -> type[ServiceError]:
    if message.startswith(("Signature expired", "Signature not yet current")):
        return ExpiredTokenError  # a wrong clock; with other messages, the same code means a wrong secret key
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
