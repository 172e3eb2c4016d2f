"""ListStreams: names and short descriptions, in the order of the names, a page at a time."""

from typing import Final

from anabranch.limits import LIST_SHARDS_TOKEN_LIFETIME_MS
from anabranch.local.actions.action import Answer, Request
from anabranch.local.descriptions import creation_time
from anabranch.local.shapes import NEXT_TOKEN, PAGE_SIZE, STREAM_NAME, StructureShape
from anabranch.local.state.account import Account
from anabranch.local.state.identifiers import PageToken, read_token, write_token

REQUEST = StructureShape({"Limit": PAGE_SIZE, "ExclusiveStartStreamName": STREAM_NAME, "NextToken": NEXT_TOKEN})

_PAGE_MAX: Final = 100  # API: also the default


def list_streams(account: Account, request: Request, now_ms: int) -> Answer:
    after = request.get("ExclusiveStartStreamName", "")
    if "NextToken" in request:
        lifetime_ms = account.settings.scaled_ms(LIST_SHARDS_TOKEN_LIFETIME_MS)
        after = read_token(request["NextToken"], "ListStreams", now_ms, lifetime_ms).after
    names = sorted(name for name in account.streams if name > after)
    limit = min(request.get("Limit", _PAGE_MAX), _PAGE_MAX)
    page = names[:limit]
    answer: Answer = {
        "StreamNames": page,
        "HasMoreStreams": len(names) > limit,
        "StreamSummaries": [
            {
                "StreamName": name,
                "StreamARN": account.streams[name].arn,
                "StreamStatus": account.streams[name].status,
                "StreamModeDetails": {"StreamMode": account.streams[name].mode},
                "StreamCreationTimestamp": creation_time(account.streams[name]),
            }
            for name in page
        ],
    }
    if len(names) > limit:
        answer["NextToken"] = write_token(PageToken(operation="ListStreams", after=page[-1], issued_ms=now_ms))
    return answer
