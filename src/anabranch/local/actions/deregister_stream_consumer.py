"""DeregisterStreamConsumer: DELETING, then gone; its subscriptions end."""

from anabranch.local.actions.action import Answer, Request
from anabranch.local.lookups import find_consumer
from anabranch.local.shapes import CONSUMER_ARN, CONSUMER_NAME, STREAM_BY_ARN, StructureShape
from anabranch.local.state.account import Account

REQUEST = StructureShape({**STREAM_BY_ARN, "ConsumerName": CONSUMER_NAME, "ConsumerARN": CONSUMER_ARN})


def deregister_stream_consumer(account: Account, request: Request, now_ms: int) -> Answer:
    stream, consumer = find_consumer(account, request)
    if consumer.status != "DELETING":
        account.delete_consumer(stream, consumer, now_ms)
    return {}
