"""Consumers with enhanced fan-out and their subscriptions."""

from typing import Final

from anabranch import limits
from anabranch.local.actions.lookups import (
    Answer,
    Request,
    StartingPosition,
    action,
    check_active_or_updating,
    check_creation_time,
    find_consumer,
    find_consumer_by_arn,
    find_shard,
    find_stream,
    find_token,
    resolve_position,
)
from anabranch.local.actions.resources import check_tags
from anabranch.local.errors import dry_run, in_use, limit_exceeded, stream_not_found
from anabranch.local.state.account import Account
from anabranch.local.state.identifiers import PageToken, write_token
from anabranch.local.state.stream import Consumer
from anabranch.local.state.subscription import Subscription

_PAGE_MAX: Final = 100  # API reference: also the default


@action("RegisterStreamConsumer")
def register_stream_consumer(account: Account, request: Request, now_ms: int) -> Answer:
    stream = check_active_or_updating(account, find_stream(account, request))
    name, owner = request["ConsumerName"], account.settings.account_id
    if name in stream.consumers:
        raise in_use(f"Consumer {name} under stream {stream.name} already exists for account {owner}.")
    is_advantage = stream.mode == "ON_DEMAND" and account.commitment.is_enabled(now_ms)
    consumers_max = limits.CONSUMERS_PER_STREAM_ADVANTAGE_MAX if is_advantage else limits.CONSUMERS_PER_STREAM_MAX
    if len(stream.consumers) >= consumers_max:
        raise limit_exceeded(
            f"The limit of {consumers_max} registered consumers is reached for {account.stream_label(stream)}."
        )
    creating = sum(consumer.status == "CREATING" for consumer in stream.consumers.values())
    if creating >= limits.CONSUMERS_CREATING_MAX:
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
    answer = {"Consumer": consumer.members()}  # always CREATING, as on AWS
    account.add_consumer(stream, consumer, now_ms)
    return answer


@action("DeregisterStreamConsumer")
def deregister_stream_consumer(account: Account, request: Request, now_ms: int) -> Answer:
    """Also ends the subscriptions of the consumer."""
    stream, consumer = find_consumer(account, request)
    if consumer.status != "DELETING":
        account.delete_consumer(stream, consumer, now_ms)
    return {}


@action("DescribeStreamConsumer")
def describe_stream_consumer(account: Account, request: Request, now_ms: int) -> Answer:
    stream, consumer = find_consumer(account, request)
    return {"ConsumerDescription": {**consumer.members(), "StreamARN": stream.arn}}


@action("ListStreamConsumers")
def list_stream_consumers(account: Account, request: Request, now_ms: int) -> Answer:
    """In the order of their names."""
    stream = find_stream(account, request)
    check_creation_time(account, stream, request)
    after = ""
    if "NextToken" in request:
        token = find_token(account, request["NextToken"], "ListStreamConsumers", now_ms)
        if token.stream_created_ms != stream.created_ms:
            raise stream_not_found(stream.name, account.settings.account_id)
        after = token.after
    names = sorted(name for name in stream.consumers if name > after)
    limit = min(request.get("MaxResults", _PAGE_MAX), _PAGE_MAX)
    answer: Answer = {"Consumers": [stream.consumers[name].members() for name in names[:limit]]}
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


def subscribe_to_shard(account: Account, request: Request, now_ms: int) -> Subscription:
    """Another call for the same consumer and shard fails for five seconds; after that, it takes over."""
    stream, consumer = find_consumer_by_arn(account, request["ConsumerARN"])
    shard = find_shard(account, stream, request["ShardId"], now_ms)
    if consumer.status != "ACTIVE":
        raise in_use(f"Consumer {consumer.arn} is not ACTIVE, instead in state {consumer.status}.")
    shard.log.trim(account.horizon_ms(stream, now_ms))
    asked = request["StartingPosition"]
    start = StartingPosition(asked["Type"], asked.get("SequenceNumber"), asked.get("Timestamp"))
    position = resolve_position(shard, start, now_ms, "SubscribeToShard", account.stream_label(stream))
    if not account.rates.allows_subscription(consumer.arn, shard.shard_id, now_ms):
        raise limit_exceeded(
            f"SubscribeToShard can be called {limits.SUBSCRIBE_PER_SECOND} time a second for consumer {consumer.arn} "
            f"and shard {shard.shard_id}."
        )
    previous = account.subscriptions.get((consumer.arn, shard.shard_id))
    if previous is not None and previous.is_fresh(now_ms):
        raise in_use(
            f"Another active subscription exists for this consumer: {consumer.arn} on {shard.shard_id}; "
            "it can be taken over five seconds after it started."
        )
    if request.get("DryRun"):
        raise dry_run()
    subscription = Subscription(account.settings, stream, consumer, shard, position, now_ms)
    account.add_subscription(subscription, now_ms)
    return subscription
