"""DynamoDB calls over HTTP: how they are signed and read, and one client for each event loop."""

import asyncio
import contextlib
import json
import math
import threading

import pytest
from hypothesis import given, strategies as st

from anabranch._aws.account import AwsAccount
from anabranch._aws.dynamodb_client import DynamoDbByLoop, ItemKey, ItemWrite, from_attribute, from_item, to_attribute
from anabranch.config import Aws
from anabranch.errors import CodecError, ExpiredTokenError, ThrottledError, TransportError
from canned_server import answer, canned_server, read_request


class Keys:
    access_key, secret_key, token = "AK1", "secret", None


def run(main, *replies):
    """`main(clients, seen, server)` with a server that gives these answers, one after another."""

    async def guarded():
        seen = []

        async def conversation(reader, writer):
            while True:
                seen.append(await read_request(reader))
                writer.write(replies[min(len(seen), len(replies)) - 1])
                await writer.drain()

        async with asyncio.timeout(20), canned_server(conversation) as server:
            account = AwsAccount(Aws(credentials=Keys()))
            clients = DynamoDbByLoop(account, "eu-west-1", server.url)
            try:
                await main(clients, seen, server)
            finally:
                await clients.close()
                account.close()
            await server.all_gone()

    asyncio.run(guarded())


def refusal(code, message="no", **members):
    body = {"__type": f"com.amazonaws.dynamodb.v20120810#{code}", "message": message, **members}
    return answer(json.dumps(body).encode(), b"400 Bad Request")


def test_a_call_speaks_json_1_0_and_signs_for_dynamodb():
    async def main(clients, seen, server):
        client = await clients.get()
        assert client.region == "eu-west-1"
        assert await client.call("DescribeTable", {"TableName": "anabranch", "Other": None}) == {"Table": {}}
        head, _, body = seen[0].partition(b"\r\n\r\n")
        assert b"content-type: application/x-amz-json-1.0" in head.lower()
        assert b"x-amz-target: dynamodb_20120810.describetable" in head.lower()
        assert b"/eu-west-1/dynamodb/aws4_request" in head
        assert json.loads(body) == {"TableName": "anabranch"}

    run(main, answer(b'{"Table": {}}'))


def test_a_condition_that_fails_is_a_result_with_the_row():
    async def main(clients, seen, server):
        client = await clients.get()
        write = ItemWrite(ItemKey("p", "s"), {"state": "left"}, where={"state": "live"})
        outcome = await client.write("UpdateItem", write.body("anabranch"), repeatable=False)
        assert not outcome.holds
        assert outcome.before == {"state": "sealed", "counter": 3}
        outcome = await client.write("UpdateItem", write.body("anabranch"), repeatable=False)
        assert (outcome.holds, outcome.before) == (False, None)
        outcome = await client.write("UpdateItem", write.body("anabranch"), repeatable=False)
        assert (outcome.holds, outcome.before) == (True, {"counter": 3})
        assert json.loads(seen[0].partition(b"\r\n\r\n")[2]) == {
            "TableName": "anabranch",
            "Key": {"PK": {"S": "p"}, "SK": {"S": "s"}},
            "UpdateExpression": "SET #state = :v0",
            "ConditionExpression": "#state = :v1",
            "ExpressionAttributeNames": {"#state": "state"},
            "ExpressionAttributeValues": {":v0": {"S": "left"}, ":v1": {"S": "live"}},
            "ReturnValues": "ALL_OLD",
            "ReturnValuesOnConditionCheckFailure": "ALL_OLD",
        }

    item = {"state": {"S": "sealed"}, "counter": {"N": "3"}}
    run(
        main,
        refusal("ConditionalCheckFailedException", Item=item),
        refusal("ConditionalCheckFailedException"),
        answer(b'{"Attributes": {"counter": {"N": "3"}}}'),
    )


@pytest.mark.parametrize(
    "reply, error",
    [
        (refusal("ProvisionedThroughputExceededException"), ThrottledError),
        (
            refusal("InvalidSignatureException", "Signature expired: 20200101 is now earlier than ..."),
            ExpiredTokenError,
        ),
        (answer(b"not json"), TransportError),
        (answer(b"[]"), TransportError),
        (answer(b'{"Attributes": {"counter": {"N": "many"}}}'), TransportError),
        (answer(b'{"Attributes": {"counter": {}}}'), TransportError),
        (answer(b'{"Attributes": 3}'), TransportError),
        (refusal("ConditionalCheckFailedException", Item="what"), TransportError),
    ],
)
def test_other_errors_are_raised_and_the_call_is_sent_once(reply, error):
    async def main(clients, seen, server):
        write = ItemWrite(ItemKey("p", "s"), where={"PK": None})
        with pytest.raises(error):
            await (await clients.get()).write("DeleteItem", write.body("anabranch"), repeatable=False)
        assert len(seen) == 1

    run(main, reply)


def test_each_event_loop_has_a_client_and_closes_it_when_it_ends():
    async def main(clients, seen, server):
        here = await clients.get()
        assert await clients.get() is here
        others = []

        async def elsewhere():
            client = await clients.get()
            others.append(client)
            await client.call("DescribeTable", {})

        thread = threading.Thread(target=lambda: asyncio.run(elsewhere()))
        thread.start()
        await asyncio.to_thread(thread.join)
        assert others[0] is not here
        await here.call("DescribeTable", {})

    run(main, answer(b"{}"))  # the server has seen all connections close


def test_clients_of_loops_that_run_elsewhere_are_closed_with_the_store():
    async def main(clients, seen, server):
        loop = asyncio.new_event_loop()
        thread = threading.Thread(target=loop.run_forever)
        thread.start()

        async def elsewhere():
            await (await clients.get()).call("DescribeTable", {})

        await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(elsewhere(), loop))
        await clients.close()
        await server.all_gone()
        loop.call_soon_threadsafe(loop.stop)
        await asyncio.to_thread(thread.join)
        loop.close()

    run(main, answer(b"{}"))


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**30), 10**30) | st.floats(-1e30, 1e30) | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(json_values)
def test_every_value_is_read_as_it_was_written(value):
    assert from_attribute(json.loads(json.dumps(to_attribute(value)))) == value


@given(
    st.recursive(
        st.none() | st.text() | st.integers(),
        lambda inner: st.lists(inner) | st.dictionaries(st.sampled_from(["S", "N", "L", "M", "B", "SS", "?"]), inner),
    )
)
def test_garbage_is_a_codec_error(garbage):
    with contextlib.suppress(CodecError):
        from_item({"a": garbage})


def test_sets_and_unknown_types_of_a_table_edited_by_hand():
    assert from_item({"a": {"SS": ["x", "y"]}, "b": {"NS": ["1", "2.5"]}}) == {"a": ["x", "y"], "b": [1, 2.5]}
    with pytest.raises(CodecError, match="DynamoDB has no type for set"):
        to_attribute({1})
    assert math.isclose(from_attribute({"N": "1.5E+2"}), 150)
