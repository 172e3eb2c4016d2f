"""ListTagsForStream: a stream's tags in the order of their keys, a page at a time."""

from anabranch.local.actions.action import Answer, Request
from anabranch.local.descriptions import list_tags
from anabranch.local.lookups import find_stream
from anabranch.local.shapes import NAMED_STREAM, TAG_KEY, IntegerShape, StructureShape
from anabranch.local.state.account import Account

REQUEST = StructureShape(
    {**NAMED_STREAM, "ExclusiveStartTagKey": TAG_KEY, "Limit": IntegerShape(value_min=1, value_max=50)}
)


def list_tags_for_stream(account: Account, request: Request, now_ms: int) -> Answer:  # noqa: ARG001 -- an action's form
    stream = find_stream(account, request)
    after = request.get("ExclusiveStartTagKey", "")
    tags = [tag for tag in list_tags(stream.tags) if tag["Key"] > after]
    limit = request.get("Limit", len(tags))
    return {"Tags": tags[:limit], "HasMoreTags": len(tags) > limit}
