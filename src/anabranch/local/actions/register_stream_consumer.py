"""RegisterStreamConsumer: a name that may subscribe to the stream's shards."""

from anabranch.limits import CONSUMERS_CREATING_MAX, CONSUMERS_PER_STREAM_ADVANTAGE_MAX, CONSUMERS_PER_STREAM_MAX
from anabranch.local.actions.action import Answer, Request
from anabranch.local.descriptions import describe_consumer
from anabranch.local.errors import in_use, limit_exceeded
from anabranch.local.lookups import check_settled, find_stream_by_arn
from anabranch.local.shapes import CONSUMER_NAME, STREAM_BY_ARN, TAG_MAP, StructureShape
from anabranch.local.state.account import Account
from anabranch.local.state.stream import Consumer
from anabranch.local.tags import check_tags

REQUEST = StructureShape(
    {**STREAM_BY_ARN, "ConsumerName": CONSUMER_NAME, "Tags": TAG_MAP}, required=("StreamARN", "ConsumerName")
)


def register_stream_consumer(account: Account, request: Request, now_ms: int) -> Answer:
    stream = check_settled(account, find_stream_by_arn(account, request["StreamARN"]))
    name, owner = request["ConsumerName"], account.settings.account_id
    if name in stream.consumers:
        raise in_use(f"Consumer {name} under stream {stream.name} already exists for account {owner}.")
    is_advantage = stream.mode == "ON_DEMAND" and account.commitment.is_enabled(now_ms)
    consumers_max = CONSUMERS_PER_STREAM_ADVANTAGE_MAX if is_advantage else CONSUMERS_PER_STREAM_MAX
    if len(stream.consumers) >= consumers_max:
        raise limit_exceeded(
            f"The limit of {consumers_max} registered consumers is reached for {account.stream_label(stream)}."
        )
    creating = sum(consumer.status == "CREATING" for consumer in stream.consumers.values())
    if creating >= CONSUMERS_CREATING_MAX:
        raise limit_exceeded(
            f"There are already {creating} consumers in CREATING for {account.stream_label(stream)}: "
            "wait for one to be ACTIVE."
        )
    tags = dict(request.get("Tags", {}))
    check_tags(tags)
    consumer = Consumer(
        name=name,
        arn=f"{stream.arn}/consumer/{name}:{now_ms // 1000}",
        created_ms=now_ms,
        status="CREATING",
        deadline_ms=None,
        tags=tags,
    )
    answer = {"Consumer": describe_consumer(consumer)}  # CREATING, as the service always answers here
    account.add_consumer(stream, consumer, now_ms)
    return answer
