"""NextToken: where a listing goes on, for three hundred seconds.

The token holds the whole question (the stream's incarnation, the filter), because AWS takes no other parameter
beside it.
"""

import binascii
from base64 import b64decode, b64encode
from typing import Final

import msgspec

from anabranch.local.errors import LocalError, invalid_argument

__all__ = ["PageToken", "read_token", "write_token"]


class PageToken(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    operation: str
    after: str
    """The last name or id of the page before."""
    given_ms: int
    stream_name: str = ""
    stream_created_ms: int = 0
    filter_type: str = ""
    filter_ms: int = 0


_ENCODER: Final = msgspec.json.Encoder()
_DECODER: Final = msgspec.json.Decoder(PageToken)


def write_token(token: PageToken) -> str:
    return b64encode(_ENCODER.encode(token)).decode()


def read_token(text: str, operation: str, now_ms: int, lifetime_ms: int) -> PageToken:
    try:
        token = _DECODER.decode(b64decode(text.encode("ascii"), validate=True))
    except (binascii.Error, UnicodeEncodeError, msgspec.DecodeError):
        raise invalid_argument(f"NextToken {text[:80]} is not valid.") from None
    if token.operation != operation:
        raise invalid_argument(f"NextToken {text[:80]} was not given by {operation}.")
    if now_ms - token.given_ms > lifetime_ms:
        raise LocalError(
            "ExpiredNextTokenException",
            f"NextToken is expired: it was given {now_ms - token.given_ms} milliseconds ago and lives {lifetime_ms}.",
        )
    return token
