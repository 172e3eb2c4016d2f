import json

from anabranch._wire.bodies import (
    decode_describe_stream_consumer,
    decode_list_stream_consumers,
    decode_register_stream_consumer,
    encode_deregister_stream_consumer,
    encode_list_stream_consumers,
    encode_stream_consumer,
)
from anabranch._wire.messages import ConsumerDescription, ListStreamConsumersResponse

CONSUMER = {
    "ConsumerName": "billing",
    "ConsumerARN": "arn:c",
    "ConsumerStatus": "CREATING",
    "ConsumerCreationTimestamp": 1.5e9,
}
VALUE = ConsumerDescription("billing", "arn:c", "CREATING", 1.5e9)


def test_requests_name_what_they_are_about() -> None:
    assert encode_stream_consumer("arn:s", "billing") == [b'{"StreamARN":"arn:s","ConsumerName":"billing"}']
    assert encode_list_stream_consumers("arn:s", next_token="T") == [b'{"StreamARN":"arn:s","NextToken":"T"}']
    assert encode_deregister_stream_consumer("arn:c") == [b'{"ConsumerARN":"arn:c"}']


def test_a_consumer_is_the_same_value_in_every_answer() -> None:
    assert decode_register_stream_consumer(json.dumps({"Consumer": CONSUMER}).encode()) == VALUE
    described = json.dumps({"ConsumerDescription": CONSUMER | {"StreamARN": "arn:s"}}).encode()
    assert decode_describe_stream_consumer(described) == VALUE
    listed = json.dumps({"Consumers": [CONSUMER], "NextToken": "T"}).encode()
    assert decode_list_stream_consumers(listed) == ListStreamConsumersResponse((VALUE,), "T")
    assert decode_list_stream_consumers(b"{}") == ListStreamConsumersResponse(())
