"""AWS Signature Version 4 for `POST /` calls whose operation is named by X-Amz-Target (Kinesis, DynamoDB).

Only the date and the hash of the body differ between calls of one operation. So the rest is prepared once per
(operation, content type), the signing key is derived once per day and the date is formatted once per second. Each call
needs two hashes and one HMAC. The body is hashed piece by piece and never joined.

A signer is for one set of credentials, one host and one thread; new credentials need a new signer. It has no clock: a
caller that knows its clock is wrong corrects `now_ms`.
"""

import hmac
import re
from collections.abc import Iterable
from datetime import UTC, datetime
from hashlib import sha256

import msgspec

from anabranch.errors import ConfigurationError, CredentialsError

_ALGORITHM = "AWS4-HMAC-SHA256"
_HEADER_VALUE = re.compile(r"[!-~]+")  # visible ASCII: nothing to trim or collapse, nothing that ends a header


class SigningCredentials(msgspec.Struct, frozen=True):
    access_key_id: str
    secret_access_key: str
    session_token: str | None = None

    def __repr__(self) -> str:
        return f"SigningCredentials({self.access_key_id!r}, secrets not shown)"


class _Operation(msgspec.Struct, frozen=True):
    """What is the same for every call of one operation with one content type."""

    canonical_start: str
    canonical_end: str
    signed_names: str
    lines: bytes
    pairs: tuple[tuple[str, str], ...]


class SignedHeaders(msgspec.Struct, frozen=True):
    """The signed headers and the signature. Unsigned headers (content-length, user-agent) may be added."""

    operation: _Operation
    amz_date: str
    authorization: str

    def lines(self) -> bytes:
        """For HTTP/1.1: each header with its line end."""
        dynamic = f"X-Amz-Date: {self.amz_date}\r\nAuthorization: {self.authorization}\r\n"
        return self.operation.lines + dynamic.encode("ascii")

    def pairs(self) -> tuple[tuple[str, str], ...]:
        """For HTTP/2: names in lower case; `host` becomes `:authority`."""
        return (*self.operation.pairs, ("x-amz-date", self.amz_date), ("authorization", self.authorization))


class Signer:
    def __init__(self, credentials: SigningCredentials, *, region: str, service: str, host: str) -> None:
        """`host` is the value of the Host header: with the port, unless it is the default of the scheme."""
        for name, value in (("access key id", credentials.access_key_id), ("session token", credentials.session_token)):
            if value is not None and _HEADER_VALUE.fullmatch(value) is None:
                raise CredentialsError(f"the {name} is empty or has characters that are not allowed in a header")
        for name, value in (("region", region), ("service", service), ("host", host)):
            if _HEADER_VALUE.fullmatch(value) is None:
                raise ConfigurationError(
                    f"the {name} {value!r} is empty or has characters that are not allowed in a header"
                )
        self.credentials = credentials
        self._region = region
        self._service = service
        self._host = host
        self._operations: dict[tuple[str, str], _Operation] = {}
        self._second: int | None = None
        self._amz_date = self._day = self._scope = ""
        self._inner = self._outer = sha256()
        """The states of HMAC (RFC 2104) that depend only on the key of the day. Each call continues copies of them:
        `hmac` costs twice as much.
        """

    def sign(self, target: str, content_type: str, body: Iterable[bytes], now_ms: int) -> SignedHeaders:
        """`target` is the value of X-Amz-Target, such as `Kinesis_20131202.GetRecords`."""
        second = now_ms // 1000
        if second != self._second:
            self._set_second(second)
        operation = self._operations.get((target, content_type)) or self._prepare(target, content_type)
        body_hash = sha256()
        for piece in body:
            body_hash.update(piece)
        canonical = f"{operation.canonical_start}{self._amz_date}{operation.canonical_end}{body_hash.hexdigest()}"
        to_sign = f"{_ALGORITHM}\n{self._amz_date}\n{self._scope}\n{sha256(canonical.encode('ascii')).hexdigest()}"
        inner, outer = self._inner.copy(), self._outer.copy()
        inner.update(to_sign.encode("ascii"))
        outer.update(inner.digest())
        authorization = (
            f"{_ALGORITHM} Credential={self.credentials.access_key_id}/{self._scope}, "
            f"SignedHeaders={operation.signed_names}, Signature={outer.hexdigest()}"
        )
        return SignedHeaders(operation, self._amz_date, authorization)

    def _set_second(self, second: int) -> None:
        self._second = second
        self._amz_date = datetime.fromtimestamp(second, UTC).strftime("%Y%m%dT%H%M%SZ")
        day = self._amz_date[:8]
        if day != self._day:
            self._day = day
            self._scope = f"{day}/{self._region}/{self._service}/aws4_request"
            key = b"AWS4" + self.credentials.secret_access_key.encode()
            for part in (day, self._region, self._service, "aws4_request"):
                key = hmac.digest(key, part.encode("ascii"), "sha256")
            padded = key.ljust(sha256().block_size, b"\0")
            self._inner = sha256(bytes(byte ^ 0x36 for byte in padded))
            self._outer = sha256(bytes(byte ^ 0x5C for byte in padded))

    def _prepare(self, target: str, content_type: str) -> _Operation:
        """Signing needs the headers sorted by name."""
        before = (("content-type", content_type), ("host", self._host))
        token = self.credentials.session_token
        after = (() if token is None else (("x-amz-security-token", token),)) + (("x-amz-target", target),)
        signed_names = ";".join(name for name, _ in (*before, ("x-amz-date", ""), *after))
        operation = _Operation(
            canonical_start="POST\n/\n\n" + "".join(f"{name}:{value}\n" for name, value in before) + "x-amz-date:",
            canonical_end="\n" + "".join(f"{name}:{value}\n" for name, value in after) + f"\n{signed_names}\n",
            signed_names=signed_names,
            lines="".join(f"{name.title()}: {value}\r\n" for name, value in (*before, *after)).encode("ascii"),
            pairs=(*before, *after),
        )
        self._operations[target, content_type] = operation
        return operation
