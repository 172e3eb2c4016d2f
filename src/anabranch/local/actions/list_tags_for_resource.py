"""ListTagsForResource: all tags of a stream or a consumer."""

from anabranch.local.actions.action import Answer, Request
from anabranch.local.descriptions import list_tags
from anabranch.local.lookups import find_resource
from anabranch.local.shapes import RESOURCE, StructureShape
from anabranch.local.state.account import Account

REQUEST = StructureShape({**RESOURCE}, required=("ResourceARN",))


def list_tags_for_resource(account: Account, request: Request, now_ms: int) -> Answer:  # noqa: ARG001 -- action's form
    _, resource = find_resource(account, request)
    return {"Tags": list_tags(resource.tags)}
