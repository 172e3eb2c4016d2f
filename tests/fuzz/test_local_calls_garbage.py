"""Hostile requests to the local Kinesis: any members for any operation get a response, never an internal error."""

import asyncio
import random

import msgspec
import pytest
from hypothesis import given, settings, strategies as st

from anabranch._http.server.exchange import Request, Response
from anabranch.local import cbor
from anabranch.local.faults import Faults
from anabranch.local.http import EventStreams, KinesisHttpApp
from anabranch.local.service import LocalState
from anabranch.local.shapes import REQUESTS

NOW_MS = 1_794_000_000_000
AUTHORIZATION = (
    "AWS4-HMAC-SHA256 Credential=a/20261116/us-east-1/kinesis/aws4_request, SignedHeaders=host, Signature=00"
)
STREAM_ARN = "arn:aws:kinesis:us-east-1:000000000000:stream/orders"
OPERATIONS = sorted(REQUESTS)
MEMBERS = sorted({name for shape in REQUESTS.values() for name in shape.members})


def make_app():
    state = LocalState(entropy=random.Random(1))
    state.call("CreateStream", {"StreamName": "orders", "ShardCount": 2}, now_ms=NOW_MS)
    state.settle(NOW_MS)
    streams = EventStreams(lambda: NOW_MS)
    return KinesisHttpApp(
        state,
        Faults(random.Random(1)),
        streams,
        clock_ms=lambda: NOW_MS,
        journal=None,
        after_call=lambda: None,
    )


def ask(app, operation, body, content_type):
    headers = {
        "content-type": content_type,
        "x-amz-target": f"Kinesis_20131202.{operation}",
        "x-amz-date": "20261116T000000Z",
        "authorization": AUTHORIZATION,
    }
    answer = app(Request("POST", "/", headers, body, "1.1"))
    if isinstance(answer, Response):
        assert answer.status < 500
    else:
        asyncio.run(answer.chunks.aclose())


words = st.sampled_from(
    [
        "orders",
        "shardId-000000000000",
        "shardId-99",
        "LATEST",
        "AT_SEQUENCE_NUMBER",
        STREAM_ARN,
        "0",
        "key",
        "PROVISIONED",
    ]
)
scalars = st.one_of(
    st.none(), st.booleans(), st.integers(-(2**70), 2**70), st.floats(allow_nan=False), words, st.text(max_size=20)
)
values = st.recursive(
    scalars,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.sampled_from(MEMBERS) | st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=8,
)


@st.composite
def calls(draw):
    operation = draw(st.sampled_from(OPERATIONS))
    names = sorted(REQUESTS[operation].members)
    plausible = st.fixed_dictionaries({}, optional=dict.fromkeys(names, words | values))
    return operation, draw(plausible | values)


@given(st.lists(calls(), min_size=1, max_size=5))
@settings(max_examples=200)
def test_any_json_for_any_operation_gets_an_answer(requests):
    app = make_app()
    for operation, members in requests:
        ask(app, operation, msgspec.json.encode(members), "application/x-amz-json-1.1")


cbor_values = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-(2**60), 2**60), st.floats(), st.binary(max_size=20), words),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.sampled_from(MEMBERS), inner, max_size=3)),
    max_leaves=8,
)


@given(st.sampled_from(OPERATIONS), cbor_values)
@settings(max_examples=200)
def test_any_cbor_for_any_operation_gets_an_answer(operation, members):
    ask(make_app(), operation, cbor.encode(members), "application/x-amz-cbor-1.1")


@pytest.mark.parametrize("content_type", ["application/x-amz-json-1.1", "application/x-amz-cbor-1.1"])
@given(body=st.binary(max_size=200), operation=st.sampled_from(OPERATIONS))
@settings(max_examples=150)
def test_any_bytes_get_an_answer(content_type, body, operation):
    ask(make_app(), operation, body, content_type)
