"""IncreaseStreamRetentionPeriod: records live longer; those that had expired stay gone."""

from anabranch.local.actions.action import Answer, Request
from anabranch.local.errors import invalid_argument
from anabranch.local.lookups import find_active_stream
from anabranch.local.retention import RETENTION_REQUEST, checked_hours, set_retention
from anabranch.local.state.account import Account

REQUEST = RETENTION_REQUEST


def increase_stream_retention_period(account: Account, request: Request, now_ms: int) -> Answer:
    stream = find_active_stream(account, request)
    hours = checked_hours(request)
    if hours < stream.retention_hours:
        raise invalid_argument(
            f"Requested retention period ({hours} hours) for stream {stream.name} can not be shorter than "
            f"existing retention period ({stream.retention_hours} hours). Use DecreaseRetentionPeriod API."
        )
    set_retention(account, stream, hours, now_ms)
    return {}
