"""UpdateMaxRecordSize: how large one record of a stream may be, from 1 to 10 MiB."""

from anabranch.local.actions.action import Answer, Request
from anabranch.local.lookups import find_active_stream
from anabranch.local.shapes import MAX_RECORD_SIZE_KIB, STREAM_BY_ARN, StructureShape
from anabranch.local.state.account import Account

REQUEST = StructureShape({**STREAM_BY_ARN, "MaxRecordSizeInKiB": MAX_RECORD_SIZE_KIB}, required=("MaxRecordSizeInKiB",))


def update_max_record_size(account: Account, request: Request, now_ms: int) -> Answer:
    stream = find_active_stream(account, request)
    stream.max_record_kib = request["MaxRecordSizeInKiB"]
    account.update_stream(stream, now_ms)
    return {}
