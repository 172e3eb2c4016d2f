"""DeleteResourcePolicy: takes the policy off a stream or a consumer."""

from anabranch.local.actions.action import Answer, Request
from anabranch.local.errors import not_found
from anabranch.local.lookups import find_resource
from anabranch.local.shapes import RESOURCE, StructureShape
from anabranch.local.state.account import Account

REQUEST = StructureShape({**RESOURCE}, required=("ResourceARN",))


def delete_resource_policy(account: Account, request: Request, now_ms: int) -> Answer:  # noqa: ARG001 -- action's form
    stream, resource = find_resource(account, request)
    if resource.policy is None:
        raise not_found(f"No resource policy found for resource ARN {request['ResourceARN']}")
    resource.policy = None
    account.mark_written(stream)
    return {}
