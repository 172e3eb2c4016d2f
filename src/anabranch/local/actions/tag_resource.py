"""TagResource: adds tags to a stream or a consumer."""

from anabranch.local.actions.action import Answer, Request
from anabranch.local.lookups import find_resource
from anabranch.local.shapes import RESOURCE, TAG_MAP, StructureShape
from anabranch.local.state.account import Account
from anabranch.local.tags import add_tags

REQUEST = StructureShape({**RESOURCE, "Tags": TAG_MAP}, required=("Tags", "ResourceARN"))


def tag_resource(account: Account, request: Request, now_ms: int) -> Answer:  # noqa: ARG001 -- an action's form
    stream, resource = find_resource(account, request)
    add_tags(resource, request["Tags"])
    account.mark_written(stream)
    return {}
