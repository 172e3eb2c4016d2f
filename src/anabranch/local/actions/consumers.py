"""Consumers with enhanced fan-out and their subscriptions."""

from typing import Final

from anabranch import limits
from anabranch.local.actions.calls import Answer, Call, action
from anabranch.local.actions.resources import check_tags
from anabranch.local.errors import in_use, limit_exceeded, stream_not_found
from anabranch.local.state.identifiers import PageToken, write_token
from anabranch.local.state.stream import Consumer
from anabranch.local.state.subscription import Subscription

_PAGE_MAX: Final = 100  # API reference: also the default


@action("RegisterStreamConsumer")
def register_stream_consumer(call: Call) -> Answer:
    stream = call.find_stream()
    if stream.status != "UPDATING":
        call.check_active(stream)
    name, owner = call.request["ConsumerName"], call.account_id
    if name in stream.consumers:
        raise in_use(f"Consumer {name} under stream {stream.name} already exists for account {owner}.")
    is_advantage = stream.mode == "ON_DEMAND" and call.account.commitment.is_enabled(call.now_ms)
    consumers_max = limits.CONSUMERS_PER_STREAM_ADVANTAGE_MAX if is_advantage else limits.CONSUMERS_PER_STREAM_MAX
    if len(stream.consumers) >= consumers_max:
        raise limit_exceeded(f"The limit of {consumers_max} registered consumers is reached for {call.label(stream)}.")
    creating = sum(consumer.status == "CREATING" for consumer in stream.consumers.values())
    if creating >= limits.CONSUMERS_CREATING_MAX:
        raise limit_exceeded(
            f"There are already {creating} consumers in CREATING for {call.label(stream)}: wait for one to be ACTIVE."
        )
    tags = dict(call.request.get("Tags", {}))
    check_tags(tags)
    consumer = Consumer(
        name=name,
        arn=f"{stream.arn}/consumer/{name}:{call.now_ms // 1000}",
        created_ms=call.now_ms,
        status="CREATING",
        tags=tags,
    )
    answer = {"Consumer": consumer.members()}  # always CREATING, as on AWS
    call.account.add_consumer(stream, consumer, call.now_ms)
    return answer


@action("DeregisterStreamConsumer")
def deregister_stream_consumer(call: Call) -> Answer:
    """Also ends the subscriptions of the consumer."""
    stream, consumer = call.find_consumer()
    if consumer.status != "DELETING":
        call.account.delete(stream, consumer, call.now_ms)
    return {}


@action("DescribeStreamConsumer")
def describe_stream_consumer(call: Call) -> Answer:
    stream, consumer = call.find_consumer()
    return {"ConsumerDescription": {**consumer.members(), "StreamARN": stream.arn}}


@action("ListStreamConsumers")
def list_stream_consumers(call: Call) -> Answer:
    """In the order of their names."""
    stream = call.find_stream()
    call.check_creation_time(stream)
    after = ""
    if "NextToken" in call.request:
        token = call.read_token()
        if token.stream_created_ms != stream.created_ms:
            raise stream_not_found(stream.name, call.account_id)
        after = token.after
    names = sorted(name for name in stream.consumers if name > after)
    limit = min(call.request.get("MaxResults", _PAGE_MAX), _PAGE_MAX)
    answer: Answer = {"Consumers": [stream.consumers[name].members() for name in names[:limit]]}
    if len(names) > limit:
        following = PageToken(
            operation="ListStreamConsumers",
            after=names[limit - 1],
            issued_ms=call.now_ms,
            stream_name=stream.name,
            stream_created_ms=stream.created_ms,
        )
        answer["NextToken"] = write_token(following)
    return answer


def subscribe_to_shard(call: Call) -> Subscription:
    """Another call for the same consumer and shard fails for five seconds; after that, it takes over."""
    stream, consumer = call.find_consumer_by_arn(call.request["ConsumerARN"])
    shard = call.find_shard(stream, call.request["ShardId"])
    if consumer.status != "ACTIVE":
        raise in_use(f"Consumer {consumer.arn} is not ACTIVE, instead in state {consumer.status}.")
    start = call.request["StartingPosition"]
    position = call.find_position(stream, shard, start["Type"], start.get("SequenceNumber"), start.get("Timestamp"))
    key = consumer.arn, shard.shard_id
    if not call.account.allows_call(key, limits.SUBSCRIBE_PER_SECOND, call.now_ms):
        raise limit_exceeded(
            f"SubscribeToShard can be called {limits.SUBSCRIBE_PER_SECOND} time a second for consumer {consumer.arn} "
            f"and shard {shard.shard_id}."
        )
    previous = call.account.subscriptions.get(key)
    if previous is not None and previous.is_fresh(call.now_ms):
        raise in_use(
            f"Another active subscription exists for this consumer: {consumer.arn} on {shard.shard_id}; "
            "it can be taken over five seconds after it started."
        )
    call.check_dry_run()
    subscription = Subscription(call.account.settings, stream, consumer, shard, position, call.now_ms)
    call.account.add_subscription(subscription, call.now_ms)
    return subscription
