"""A stream's name: short, or an ARN that also says the region and the account."""

import re

import msgspec

from anabranch.limits import STREAM_NAME_CHARACTERS_MAX

__all__ = ["StreamName", "parse_stream", "wrong_stream"]

_NAME = re.compile(r"[a-zA-Z0-9_.-]+")
_ARN = re.compile(
    r"arn:(?P<partition>aws[a-z-]*):kinesis:(?P<region>[a-z0-9-]+):(?P<account>[0-9]{12}):stream/(?P<name>[^/]+)"
)


class StreamName(msgspec.Struct, frozen=True):
    name: str
    arn: str | None = None
    region: str | None = None
    account_id: str | None = None

    def __str__(self) -> str:
        return self.arn or self.name


def wrong_stream(given: object) -> TypeError:
    return TypeError(f"stream is {given!r}; it must be text: a stream's name or its ARN")


def parse_stream(text: str) -> StreamName:
    if not isinstance(text, str):
        raise wrong_stream(text)
    if text.startswith("arn:"):
        if (found := _ARN.fullmatch(text)) is None:
            raise ValueError(
                f"a stream's ARN looks like arn:aws:kinesis:eu-west-1:123456789012:stream/orders, not {text!r}"
            )
        name, arn, region, account = found["name"], text, found["region"], found["account"]
    else:
        name, arn, region, account = text, None, None, None
    if _NAME.fullmatch(name) is None or len(name) > STREAM_NAME_CHARACTERS_MAX:
        raise ValueError(f"a stream's name has 1 to 128 letters, digits, '_', '.' and '-', not {name!r}")
    return StreamName(name, arn, region, account)
