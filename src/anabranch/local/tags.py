"""Tags of streams and consumers: up to fifty, with AWS's alphabet."""

import re
from typing import Final

from anabranch.limits import TAGS_PER_STREAM_MAX
from anabranch.local.errors import invalid_argument
from anabranch.local.state.stream import Consumer, Stream

__all__ = ["add_tags", "check_tags", "remove_tags"]

_CHARACTERS: Final = re.compile(r"[\w\s.:/=+\-@%]*")


def check_tags(tags: dict[str, str]) -> None:
    for key, value in tags.items():
        if key.startswith("aws:"):
            raise invalid_argument(f"Tag key {key} is invalid: keys that begin with aws: are reserved.")
        for part in (key, value):
            if _CHARACTERS.fullmatch(part) is None:
                raise invalid_argument(
                    "Some tags contain invalid characters. Valid characters: "
                    "Unicode letters, digits, white space, _ . : / = + - % @."
                )
    if len(tags) > TAGS_PER_STREAM_MAX:
        raise invalid_argument(f"Failed to add tags: {len(tags)} tags, but a resource can have {TAGS_PER_STREAM_MAX}.")


def add_tags(resource: Stream | Consumer, tags: dict[str, str]) -> None:
    merged = {**resource.tags, **tags}
    check_tags(merged)
    resource.tags = merged


def remove_tags(resource: Stream | Consumer, keys: list[str]) -> None:
    resource.tags = {key: value for key, value in resource.tags.items() if key not in keys}
