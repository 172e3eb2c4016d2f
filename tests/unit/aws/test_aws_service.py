"""What happens to one signed call: repaired where the service did not act, sent once otherwise."""

import asyncio
import datetime as dt
import json
import re
from contextlib import asynccontextmanager
from email.utils import format_datetime

import pytest
from blockbuster import blockbuster_ctx

from anabranch._aws.account import AwsAccount
from anabranch._aws.kinesis_client import open_kinesis
from anabranch._model.streams import TRIM_HORIZON, parse_stream
from anabranch._wire.messages import PutRecordsEntry
from anabranch.config import Aws
from anabranch.errors import (
    AccessDeniedError,
    CredentialsError,
    ExpiredTokenError,
    ThrottledError,
    TransportError,
    UnavailableError,
)
from canned_server import answer, canned_server, read_request
from subscribed import subscribed

ORDERS = parse_stream("orders")
EMPTY = b'{"Records":[],"NextShardIterator":"next","MillisBehindLatest":0}'


class Keys:
    """Credentials of which each may be refused once: the next are there at once."""

    def __init__(self):
        self.access_key, self.secret_key, self.token = "AK1", "secret", "token"

    def expire(self):
        self.access_key = "AK2"


@asynccontextmanager
async def client_of(conversation, *, keys=None, timeouts=None):
    async with canned_server(conversation) as server:
        account = AwsAccount(Aws(region="eu-west-1", endpoint_url=server.url, credentials=keys or Keys()))
        try:
            async with await open_kinesis(account, timeouts=timeouts) as client:
                yield server, client
            await server.all_gone()
        finally:
            account.close()


def run(main):
    async def guarded():
        async with asyncio.timeout(30):
            with blockbuster_ctx("anabranch"):
                await main()

    asyncio.run(guarded())


def says(seen, *replies):
    """Answers request after request, on whatever connection; the last reply is repeated."""

    async def conversation(reader, writer):
        while True:
            request = await read_request(reader)
            seen.append(request)
            reply = replies[min(len(seen), len(replies)) - 1]
            writer.write(reply(request) if callable(reply) else reply)
            await writer.drain()

    return conversation


def refusal(code, message="no", status=b"400 Bad Request", headers=b""):
    body = json.dumps({"__type": f"com.amazonaws.kinesis#{code}", "message": message}).encode()
    return answer(body, status, b"x-amzn-requestid: id-7\r\n" + headers)


def test_a_call_is_signed_and_names_its_operation():
    async def main():
        seen = []
        async with client_of(says(seen, answer(EMPTY))) as (server, client):
            await client.get_records(ORDERS, "iterator", limit=5)
        head, _, body = seen[0].partition(b"\r\n\r\n")
        assert b"X-Amz-Target: Kinesis_20131202.GetRecords" in head
        assert b"Host: 127.0.0.1:%d\r\n" % server.port in head
        assert re.search(rb"Authorization: AWS4-HMAC-SHA256 Credential=AK1/\d{8}/eu-west-1/kinesis/aws4_request", head)
        assert b"X-Amz-Security-Token: token" in head
        assert b"user-agent: anabranch/" in head
        assert json.loads(body) == {"ShardIterator": "iterator", "Limit": 5}

    run(main)


def test_an_expired_token_is_repaired_with_fresh_credentials_even_for_a_write():
    async def main():
        seen, keys = [], Keys()

        def expired(request):
            keys.expire()
            return refusal("ExpiredTokenException")

        written = answer(b'{"FailedRecordCount":0,"Records":[{"SequenceNumber":"1","ShardId":"shardId-0"}]}')
        async with client_of(says(seen, expired, written), keys=keys) as (_, client):
            await client.put_records(ORDERS, [PutRecordsEntry(b"x", "k")])
        assert [re.search(rb"Credential=(\w+)/", request)[1] for request in seen] == [b"AK1", b"AK2"]

    run(main)


def test_a_token_that_stays_expired_is_an_error_after_one_call():
    async def main():
        seen = []
        async with client_of(says(seen, refusal("ExpiredTokenException", "The security token is expired"))) as (
            _,
            client,
        ):
            with pytest.raises(ExpiredTokenError, match=r"aws sso login.*id-7"):
                await client.get_records(ORDERS, "iterator")
        assert len(seen) == 1

    run(main)


def test_a_clock_that_is_off_is_corrected_from_the_services_own():
    async def main():
        seen = []
        ahead = dt.datetime.now(dt.UTC) + dt.timedelta(hours=2)
        date = b"date: %s\r\n" % format_datetime(ahead, usegmt=True).encode()

        def judge(request):
            signed = dt.datetime.strptime(
                re.search(rb"X-Amz-Date: (\w+)", request)[1].decode() + "+0000", "%Y%m%dT%H%M%SZ%z"
            )
            if abs((signed - ahead).total_seconds()) > 300:
                return refusal("InvalidSignatureException", "Signature expired: it is now earlier than", headers=date)
            return answer(EMPTY, headers=date)

        async with client_of(says(seen, judge)) as (_, client):
            first, second = await asyncio.gather(
                client.get_records(ORDERS, "iterator"), client.get_records(ORDERS, "iterator")
            )
            assert len(seen) == 4
            await client.get_records(ORDERS, "iterator")
            assert len(seen) == 5
            assert first.server_seconds == second.server_seconds == int(ahead.timestamp())
            assert client._service._clock_offset_ms == pytest.approx(7_200_000, abs=10_000)

    run(main)


def test_a_wrong_secret_is_no_clock():
    async def main():
        seen = []
        now = b"date: %s\r\n" % format_datetime(dt.datetime.now(dt.UTC), usegmt=True).encode()
        wrong = refusal("InvalidSignatureException", "The request signature we calculated does not match", headers=now)
        async with client_of(says(seen, wrong)) as (_, client):
            with pytest.raises(AccessDeniedError, match="the secret key belongs"):
                await client.get_records(ORDERS, "iterator")
        assert len(seen) == 1

    run(main)


@pytest.mark.parametrize(
    "code, status, kind",
    [
        ("ProvisionedThroughputExceededException", b"400 Bad Request", ThrottledError),
        ("InternalFailure", b"500 Internal Server Error", UnavailableError),
    ],
)
def test_nothing_else_is_tried_again_inside(code, status, kind):
    async def main():
        seen = []
        async with client_of(says(seen, refusal(code, status=status, headers=b"retry-after: 7\r\n"))) as (
            server,
            client,
        ):
            for call in (
                client.get_records(ORDERS, "iterator"),
                client.put_records(ORDERS, [PutRecordsEntry(b"x", "k")]),
                client.list_shards(ORDERS),
            ):
                with pytest.raises(kind) as failure:
                    await call
                assert failure.value.retry_after_seconds == 7
            assert len(seen) == 3
            assert server.connections == 3  # one for each purpose, kept through refusals

    run(main)


def test_a_retry_date_is_judged_by_the_services_clock():
    async def main():
        seen = []
        headers = b"date: Mon, 16 Nov 2026 10:00:00 GMT\r\nretry-after: Mon, 16 Nov 2026 10:00:30 GMT\r\n"
        reply = refusal("ServiceUnavailable", status=b"503 Service Unavailable", headers=headers)
        async with client_of(says(seen, reply)) as (_, client):
            with pytest.raises(UnavailableError) as failure:
                await client.list_shards(ORDERS)
            assert failure.value.retry_after_seconds == 30

    run(main)


def test_an_answer_for_another_number_of_records_leaves_open_what_was_written():
    async def main():
        seen = []
        async with client_of(says(seen, answer(b'{"FailedRecordCount":0,"Records":[]}'))) as (_, client):
            with pytest.raises(TransportError, match="sent 1 records, but the answer has 0") as failure:
                await client.put_records(ORDERS, [PutRecordsEntry(b"x", "k")])
            assert failure.value.maybe_sent

    run(main)


def test_a_refused_subscription_says_why_and_a_repaired_one_continues():
    async def main():
        seen, keys = [], Keys()

        def expired(request):
            keys.expire()
            return refusal("ExpiredTokenException")

        async with client_of(says(seen, expired, refusal("LimitExceededException")), keys=keys) as (_, client):
            with pytest.raises(ThrottledError, match="SubscribeToShard: LimitExceededException"):
                async with subscribed(client, "arn", "shardId-0", TRIM_HORIZON):
                    pytest.fail("accepted")
            assert len(seen) == 2

    run(main)


def test_missing_credentials_are_said_before_the_first_call(monkeypatch):
    async def main():
        account = AwsAccount(Aws(region="eu-west-1"))
        try:
            with pytest.raises(CredentialsError, match="no AWS credentials"):
                await open_kinesis(account)
        finally:
            account.close()

    run(main)


def test_an_endpoint_that_refuses_or_is_unknown_says_so():
    async def main():
        async with canned_server(says([])) as server:
            port = server.port
        for url, words in (
            (f"http://127.0.0.1:{port}", "refused the connection: check that the server is running"),
            ("http://no-such-host.invalid", "cannot resolve the host"),
        ):
            account = AwsAccount(Aws(region="eu-west-1", endpoint_url=url, credentials=Keys()))
            async with await open_kinesis(account) as client:
                with pytest.raises(TransportError, match=words) as failure:
                    await client.put_records(ORDERS, [PutRecordsEntry(b"x", "k")])
                assert not failure.value.maybe_sent
            account.close()

    run(main)
