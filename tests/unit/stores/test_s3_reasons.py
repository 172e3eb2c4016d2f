"""Reasons of failed calls to S3. Everything else about the store is tested against a server."""

import asyncio

import pytest

from anabranch.errors import AccessDeniedError, ExpiredTokenError, LeaseStoreError, ThrottledError, TransportError
from anabranch.stores.s3 import S3LeaseStore


@pytest.mark.parametrize(
    "error, code, advice",
    [
        (ThrottledError("slow down", operation="GetObject", code="SlowDown"), "throttled", None),
        (AccessDeniedError("no", operation="GetObject", code="AccessDenied"), "access_denied", "allow s3:GetObject"),
        (ExpiredTokenError("old", operation="GetObject", code="ExpiredToken"), "access_denied", "allow s3:GetObject"),
        (ExpiredTokenError("late", operation="GetObject", code="RequestTimeTooSkewed"), "clock_skew", "with NTP"),
        (TransportError("connection refused"), "no_answer", None),
    ],
)
def test_a_call_that_fails_names_its_reason(error, code, advice, monkeypatch):
    async def fail(_key):
        raise error

    async def main():
        store = S3LeaseStore("bucket", "prefix", "billing")
        monkeypatch.setattr(store._objects, "get", fail)
        with pytest.raises(LeaseStoreError, match=r"^s3://bucket/prefix") as caught:
            await store.read_app()
        assert caught.value.code == code
        assert advice is None or advice in caught.value.advice
        await store.close()

    asyncio.run(main())
