"""DeleteStream: DELETING, then gone with all its records; refused while consumers are registered, unless enforced."""

from anabranch.local.actions.action import Answer, Request
from anabranch.local.errors import in_use
from anabranch.local.lookups import find_stream
from anabranch.local.shapes import BOOLEAN, NAMED_STREAM, StructureShape
from anabranch.local.state.account import Account

REQUEST = StructureShape({**NAMED_STREAM, "EnforceConsumerDeletion": BOOLEAN})


def delete_stream(account: Account, request: Request, now_ms: int) -> Answer:
    stream = find_stream(account, request)
    if stream.consumers and not request.get("EnforceConsumerDeletion"):
        raise in_use(
            f"Stream {stream.name} under account {account.settings.account_id} has existing consumers, "
            "they must be deleted first or EnforceConsumerDeletion must be set to true."
        )
    if stream.status != "DELETING":
        account.delete_stream(stream, now_ms)
    return {}
