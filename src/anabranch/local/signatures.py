"""The form of a request's signature, with AWS's words for what is missing. The signature itself is not verified: any
credentials will do, and what the local server protects is only a developer's own machine.
"""

from typing import Final
from urllib.parse import parse_qs

from anabranch.local.errors import LocalError

__all__ = ["check_signature_form"]

_HEADER_PARTS: Final = ("Credential", "Signature", "SignedHeaders")
_QUERY_PARTS: Final = ("X-Amz-Algorithm", "X-Amz-Credential", "X-Amz-Signature", "X-Amz-SignedHeaders", "X-Amz-Date")


def check_signature_form(headers: dict[str, str], query: str) -> None:
    authorization = headers.get("authorization")
    in_query = "X-Amz-Algorithm=" in query
    if authorization is None and not in_query:
        raise LocalError("MissingAuthenticationTokenException", "Missing Authentication Token")
    if authorization is not None and in_query:
        raise LocalError(
            "InvalidSignatureException",
            "Found both 'X-Amz-Algorithm' as a query-string param and 'Authorization' as HTTP header.",
        )
    if authorization is not None:
        _check_header(authorization, headers)
    else:
        _check_query(query)


def _check_header(authorization: str, headers: dict[str, str]) -> None:
    if all(f"{part}=" in authorization for part in _HEADER_PARTS) and ("x-amz-date" in headers or "date" in headers):
        return
    missing = [f"Authorization header requires '{p}' parameter." for p in _HEADER_PARTS if f"{p}=" not in authorization]
    if "x-amz-date" not in headers and "date" not in headers:
        missing.append("Authorization header requires existence of either a 'X-Amz-Date' or a 'Date' header.")
    raise LocalError("IncompleteSignatureException", f"{' '.join(missing)} Authorization={authorization}")


def _check_query(query: str) -> None:
    given = parse_qs(query)
    missing = [f"AWS query-string parameters must include '{part}'." for part in _QUERY_PARTS if part not in given]
    if missing:
        raise LocalError("IncompleteSignatureException", f"{' '.join(missing)} Re-examine the query-string parameters.")
