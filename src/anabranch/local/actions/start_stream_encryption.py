"""StartStreamEncryption: records written from then on say that they are encrypted. No key is used, nor looked for."""

from anabranch.local.actions.action import Answer, Request
from anabranch.local.errors import invalid_argument
from anabranch.local.lookups import find_active_stream
from anabranch.local.shapes import ENCRYPTION_TYPE, KEY_ID, NAMED_STREAM, StructureShape
from anabranch.local.state.account import Account
from anabranch.local.state.stream import EncryptionChange

REQUEST = StructureShape(
    {**NAMED_STREAM, "EncryptionType": ENCRYPTION_TYPE, "KeyId": KEY_ID}, required=("EncryptionType", "KeyId")
)


def start_stream_encryption(account: Account, request: Request, now_ms: int) -> Answer:
    stream = find_active_stream(account, request)
    if request["EncryptionType"] != "KMS":
        raise invalid_argument("The only valid EncryptionType of StartStreamEncryption is KMS.")
    account.update_stream(stream, now_ms, EncryptionChange(request["KeyId"]))
    return {}
