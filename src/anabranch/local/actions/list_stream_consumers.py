"""ListStreamConsumers: a stream's consumers in the order of their names, a page at a time."""

from typing import Final

from anabranch.limits import LIST_SHARDS_TOKEN_LIFETIME_MS
from anabranch.local.actions.action import Answer, Request
from anabranch.local.descriptions import creation_time, describe_consumer
from anabranch.local.errors import stream_not_found
from anabranch.local.lookups import find_stream_by_arn
from anabranch.local.shapes import NEXT_TOKEN, PAGE_SIZE, STREAM_BY_ARN, TIMESTAMP, StructureShape
from anabranch.local.state.account import Account
from anabranch.local.state.identifiers import PageToken, read_token, write_token

REQUEST = StructureShape(
    {**STREAM_BY_ARN, "NextToken": NEXT_TOKEN, "MaxResults": PAGE_SIZE, "StreamCreationTimestamp": TIMESTAMP},
    required=("StreamARN",),
)

_PAGE_MAX: Final = 100  # API: also the default


def list_stream_consumers(account: Account, request: Request, now_ms: int) -> Answer:
    stream = find_stream_by_arn(account, request["StreamARN"])
    created = request.get("StreamCreationTimestamp")
    after = ""
    is_other = created is not None and int(created) != int(creation_time(stream))
    if "NextToken" in request:
        lifetime_ms = account.settings.scaled_ms(LIST_SHARDS_TOKEN_LIFETIME_MS)
        token = read_token(request["NextToken"], "ListStreamConsumers", now_ms, lifetime_ms)
        after, is_other = token.after, token.stream_created_ms != stream.created_ms
    if is_other:
        raise stream_not_found(stream.name, account.settings.account_id)
    names = sorted(name for name in stream.consumers if name > after)
    limit = min(request.get("MaxResults", _PAGE_MAX), _PAGE_MAX)
    answer: Answer = {"Consumers": [describe_consumer(stream.consumers[name]) for name in names[:limit]]}
    if len(names) > limit:
        following = PageToken(
            operation="ListStreamConsumers",
            after=names[limit - 1],
            issued_ms=now_ms,
            stream_name=stream.name,
            stream_created_ms=stream.created_ms,
        )
        answer["NextToken"] = write_token(following)
    return answer
