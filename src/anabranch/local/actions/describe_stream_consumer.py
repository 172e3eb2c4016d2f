"""DescribeStreamConsumer: one consumer, with the stream it belongs to."""

from anabranch.local.actions.action import Answer, Request
from anabranch.local.descriptions import describe_consumer
from anabranch.local.lookups import find_consumer
from anabranch.local.shapes import CONSUMER_ARN, CONSUMER_NAME, STREAM_BY_ARN, StructureShape
from anabranch.local.state.account import Account

REQUEST = StructureShape({**STREAM_BY_ARN, "ConsumerName": CONSUMER_NAME, "ConsumerARN": CONSUMER_ARN})


def describe_stream_consumer(account: Account, request: Request, now_ms: int) -> Answer:  # noqa: ARG001 -- action's form
    stream, consumer = find_consumer(account, request)
    return {"ConsumerDescription": {**describe_consumer(consumer), "StreamARN": stream.arn}}
