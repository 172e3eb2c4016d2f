"""What an answer that is an error says: its code and its message, in whatever form they come.

AWS's services answer in JSON with `__type` and `message` (`Message` in a SerializationException), the code
sometimes behind a namespace (`com.amazonaws.kinesis.v20131202#Code`) or in a header before a colon; what stands in
front of them answers in XML or HTML, or with nothing. The body is judged by its first byte, not by its content type,
which errors are known to get wrong. Nothing here raises: an answer that cannot be read is still an answer.
"""

import html
import re
from typing import Any, Final

import msgspec

from anabranch._wire.bodies import Buffer

__all__ = ["AwsError", "decode_aws_error"]

_BODY_BYTES_MAX: Final = 64 << 10
_CODE_CHARACTERS_MAX: Final = 128
_MESSAGE_CHARACTERS_MAX: Final = 2048

_XML_CODE: Final = re.compile(r"<Code>([^<]*)</Code>")
_XML_MESSAGE: Final = re.compile(r"<[Mm]essage>([^<]*)</[Mm]essage>")
_HTML_TITLE: Final = re.compile(r"<title>([^<]*)</title>", re.IGNORECASE)


class AwsError(msgspec.Struct, frozen=True):
    code: str | None
    """Without its namespace; None where the answer has none, and only its HTTP status tells."""
    message: str = ""


def decode_aws_error(body: Buffer, error_type: str | None = None) -> AwsError:
    """`error_type` is the header x-amzn-ErrorType; a code in the body goes before it."""
    text = bytes(body[:_BODY_BYTES_MAX]).lstrip()
    code: Any = None
    message: Any = ""
    if text.startswith(b"<"):
        code, message = _from_markup(text.decode("utf-8", "replace"))
    elif text:
        members = _members(text)
        code = members.get("__type") or members.get("code")
        message = members.get("message") or members.get("Message")
    return AwsError(
        _code(code) or _code(error_type), message[:_MESSAGE_CHARACTERS_MAX] if isinstance(message, str) else ""
    )


def _members(body: bytes) -> dict[str, Any]:
    try:
        value = msgspec.json.decode(body)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def _from_markup(text: str) -> tuple[str | None, str]:
    code = _XML_CODE.search(text)
    message = _XML_MESSAGE.search(text) or _HTML_TITLE.search(text)
    return None if code is None else code[1], "" if message is None else html.unescape(message[1]).strip()


def _code(value: Any) -> str | None:
    """`Code` of `namespace#Code:http://...`."""
    if not isinstance(value, str):
        return None
    return value.partition(":")[0].rpartition("#")[2].strip()[:_CODE_CHARACTERS_MAX] or None
