"""AddTagsToStream: adds tags, or overwrites those with the same keys."""

from anabranch.local.actions.action import Answer, Request
from anabranch.local.lookups import find_active_stream
from anabranch.local.shapes import NAMED_STREAM, TAG_MAP, StructureShape
from anabranch.local.state.account import Account
from anabranch.local.tags import add_tags

REQUEST = StructureShape({**NAMED_STREAM, "Tags": TAG_MAP}, required=("Tags",))


def add_tags_to_stream(account: Account, request: Request, now_ms: int) -> Answer:  # noqa: ARG001 -- an action's form
    stream = find_active_stream(account, request)
    add_tags(stream, request["Tags"])
    account.mark_written(stream)
    return {}
