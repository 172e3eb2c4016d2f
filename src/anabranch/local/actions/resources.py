"""Tags and policies of streams and consumers."""

import re
from typing import Final

import msgspec

from anabranch.limits import TAGS_PER_STREAM_MAX
from anabranch.local.actions.calls import Answer, Call, action
from anabranch.local.errors import invalid_argument, not_found
from anabranch.local.state.stream import Consumer, Stream

_SPACES: Final = (
    " \u00a0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000"  # separators of Unicode: no tabs, no line breaks
)
_TAG_CHARACTERS: Final = re.compile(rf"[\w{_SPACES}.:/=+\-@%]*")


def check_tags(tags: dict[str, str]) -> None:
    for key, value in tags.items():
        if key.startswith("aws:"):
            raise invalid_argument(f"Tag key {key} is invalid: keys that begin with aws: are reserved.")
        for part in (key, value):
            if _TAG_CHARACTERS.fullmatch(part) is None:
                raise invalid_argument(
                    "Some tags contain invalid characters. Valid characters: "
                    "Unicode letters, digits, white space, _ . : / = + - % @."
                )
    if len(tags) > TAGS_PER_STREAM_MAX:
        raise invalid_argument(f"Failed to add tags: a resource can have {TAGS_PER_STREAM_MAX} tags, not {len(tags)}.")


def _list_tags(resource: Stream | Consumer) -> list[dict[str, str]]:
    return [{"Key": key, "Value": resource.tags[key]} for key in sorted(resource.tags)]


def _find_tagged(call: Call) -> tuple[Stream, Stream | Consumer]:
    if "ResourceARN" in call.request:
        return call.find_resource()
    stream = call.find_active_stream()
    return stream, stream


@action("AddTagsToStream")
@action("TagResource")
def add_tags(call: Call) -> Answer:
    stream, resource = _find_tagged(call)
    tags = {**resource.tags, **call.request["Tags"]}
    check_tags(tags)
    resource.tags = tags
    call.account.mark_written(stream)
    return {}


@action("RemoveTagsFromStream")
@action("UntagResource")
def remove_tags(call: Call) -> Answer:
    """Unknown keys are ignored."""
    stream, resource = _find_tagged(call)
    resource.tags = {key: value for key, value in resource.tags.items() if key not in call.request["TagKeys"]}
    call.account.mark_written(stream)
    return {}


@action("ListTagsForStream")
def list_tags_for_stream(call: Call) -> Answer:
    stream = call.find_stream()
    after = call.request.get("ExclusiveStartTagKey", "")
    tags = [tag for tag in _list_tags(stream) if tag["Key"] > after]
    limit = call.request.get("Limit", len(tags))
    return {"Tags": tags[:limit], "HasMoreTags": len(tags) > limit}


@action("ListTagsForResource")
def list_tags_for_resource(call: Call) -> Answer:
    _, resource = call.find_resource()
    return {"Tags": _list_tags(resource)}


@action("PutResourcePolicy")
def put_resource_policy(call: Call) -> Answer:
    """Stored and returned, never enforced."""
    stream, resource = call.find_resource()
    try:
        msgspec.json.decode(call.request["Policy"], type=dict)
    except (msgspec.DecodeError, UnicodeEncodeError):
        raise invalid_argument("The policy is not valid: it must be a JSON object.") from None
    resource.policy = call.request["Policy"]
    call.account.mark_written(stream)
    return {}


@action("GetResourcePolicy")
def get_resource_policy(call: Call) -> Answer:
    _, resource = call.find_resource()
    return {"Policy": resource.policy or "{}"}


@action("DeleteResourcePolicy")
def delete_resource_policy(call: Call) -> Answer:
    stream, resource = call.find_resource()
    if resource.policy is None:
        raise not_found(f"No resource policy found for resource ARN {call.request['ResourceARN']}.")
    resource.policy = None
    call.account.mark_written(stream)
    return {}
