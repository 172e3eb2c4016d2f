"""SubscribeToShard: records of a shard are pushed to a consumer from now on.

One subscription for each consumer and shard: a second call is refused within five seconds of a successful one, and
takes over after.
"""

from collections.abc import Mapping
from typing import Any

from anabranch.limits import SUBSCRIBE_PER_SECOND
from anabranch.local.errors import dry_run, in_use, limit_exceeded
from anabranch.local.lookups import find_consumer_by_arn, find_shard
from anabranch.local.shapes import (
    BOOLEAN,
    CONSUMER_ARN,
    ITERATOR_TYPE,
    SEQUENCE_NUMBER,
    SHARD_ID,
    STREAM_ID,
    TIMESTAMP,
    StructureShape,
)
from anabranch.local.state.account import Account
from anabranch.local.state.positions import StartingPosition, resolve_position
from anabranch.local.state.subscription import Subscription

REQUEST = StructureShape(
    {
        "ConsumerARN": CONSUMER_ARN,
        "StreamId": STREAM_ID,
        "ShardId": SHARD_ID,
        "StartingPosition": StructureShape(
            {"Type": ITERATOR_TYPE, "SequenceNumber": SEQUENCE_NUMBER, "Timestamp": TIMESTAMP}, required=("Type",)
        ),
        "DryRun": BOOLEAN,
    },
    required=("ConsumerARN", "ShardId", "StartingPosition"),
)


def subscribe_to_shard(account: Account, request: Mapping[str, Any], now_ms: int) -> Subscription:
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
            f"SubscribeToShard can be called {SUBSCRIBE_PER_SECOND} time a second for consumer {consumer.arn} "
            f"and shard {shard.shard_id}."
        )
    previous = account.subscriptions.get((consumer.arn, shard.shard_id))
    if previous is not None and previous.is_fresh(now_ms):
        raise in_use(
            f"Another active subscription exists for this consumer: {consumer.arn} on {shard.shard_id}; "
            "it can be taken over five seconds after it began."
        )
    if request.get("DryRun"):
        raise dry_run()
    subscription = Subscription(account.settings, stream, consumer, shard, position, now_ms)
    account.add_subscription(subscription, now_ms)
    return subscription
