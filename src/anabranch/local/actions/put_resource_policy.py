"""PutResourcePolicy: attaches a policy to a stream or a consumer. It is kept and shown, never enforced."""

import msgspec

from anabranch.local.actions.action import Answer, Request
from anabranch.local.errors import invalid_argument
from anabranch.local.lookups import find_resource
from anabranch.local.shapes import RESOURCE, StringShape, StructureShape
from anabranch.local.state.account import Account

REQUEST = StructureShape({**RESOURCE, "Policy": StringShape()}, required=("ResourceARN", "Policy"))


def put_resource_policy(account: Account, request: Request, now_ms: int) -> Answer:  # noqa: ARG001 -- an action's form
    stream, resource = find_resource(account, request)
    try:
        msgspec.json.decode(request["Policy"], type=dict)
    except (msgspec.DecodeError, UnicodeEncodeError):
        raise invalid_argument("The policy is not valid: it must be a JSON object.") from None
    resource.policy = request["Policy"]
    account.mark_written(stream)
    return {}
