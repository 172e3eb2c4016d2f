"""RemoveTagsFromStream: removes tags by their keys; keys that are not there are no error."""

from anabranch.local.actions.action import Answer, Request
from anabranch.local.lookups import find_active_stream
from anabranch.local.shapes import NAMED_STREAM, TAG_KEYS, StructureShape
from anabranch.local.state.account import Account
from anabranch.local.tags import remove_tags

REQUEST = StructureShape({**NAMED_STREAM, "TagKeys": TAG_KEYS}, required=("TagKeys",))


def remove_tags_from_stream(account: Account, request: Request, now_ms: int) -> Answer:  # noqa: ARG001 -- action's form
    stream = find_active_stream(account, request)
    remove_tags(stream, request["TagKeys"])
    account.mark_written(stream)
    return {}
