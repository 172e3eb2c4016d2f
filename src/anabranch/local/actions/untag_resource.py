"""UntagResource: removes tags of a stream or a consumer by their keys."""

from anabranch.local.actions.action import Answer, Request
from anabranch.local.lookups import find_resource
from anabranch.local.shapes import RESOURCE, TAG_KEYS, StructureShape
from anabranch.local.state.account import Account
from anabranch.local.tags import remove_tags

REQUEST = StructureShape({**RESOURCE, "TagKeys": TAG_KEYS}, required=("TagKeys", "ResourceARN"))


def untag_resource(account: Account, request: Request, now_ms: int) -> Answer:  # noqa: ARG001 -- an action's form
    stream, resource = find_resource(account, request)
    remove_tags(resource, request["TagKeys"])
    account.mark_written(stream)
    return {}
