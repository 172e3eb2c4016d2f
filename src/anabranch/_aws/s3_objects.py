"""Small objects of one S3 bucket, read and written whole, through botocore in threads: a few calls a minute.

Each call is sent once. A condition that fails is an outcome, not an error. It knows nothing of leases.
"""

from typing import Any, Final, NamedTuple

from anabranch._aws.account import AwsAccount
from anabranch._aws.control import BotocoreCalls
from anabranch.errors import CodecError, ServiceError

_ABSENT: Final = frozenset({"NoSuchKey", "404", "HTTP 404"})
_REFUSED: Final = frozenset({"PreconditionFailed", "ConditionalRequestConflict", "412", "409", "NoSuchKey"})
"""NoSuchKey: the object that should be replaced is gone."""

_READ_SECONDS_MAX: Final = 10.0
"""Callers time out earlier. An abandoned call keeps its thread for up to this long, and there are few threads."""


class StoredObject(NamedTuple):
    body: bytes
    etag: str


class S3Objects:
    def __init__(
        self, account: AwsAccount, bucket: str, *, region: str | None = None, endpoint_url: str | None = None
    ) -> None:
        self._bucket = bucket
        self._calls = BotocoreCalls(
            account, "s3", region=region, endpoint_url=endpoint_url, read_seconds_max=_READ_SECONDS_MAX
        )

    async def get(self, key: str) -> StoredObject | None:
        """None if there is no such object."""
        answer = await self._read("GetObject", key)
        return None if answer is None else StoredObject(answer["Body"], _etag(answer))

    async def etag(self, key: str) -> str | None:
        """None if there is no such object."""
        answer = await self._read("HeadObject", key)
        return None if answer is None else _etag(answer)

    async def _read(self, operation: str, key: str) -> dict[str, Any] | None:
        try:
            return await self._calls.call(operation, Bucket=self._bucket, Key=key)
        except ServiceError as error:
            if error.code in _ABSENT:
                return None
            raise

    async def put(self, key: str, body: bytes, *, replaces: str | None) -> str | None:
        """Replaces the object with this ETag; None creates a new object. Returns the new ETag, or None if the condition
        failed or another write is in progress.
        """
        try:
            answer = await self._calls.call(
                "PutObject",
                Bucket=self._bucket,
                Key=key,
                Body=body,
                ContentType="application/json",
                IfMatch=replaces,
                IfNoneMatch="*" if replaces is None else None,
            )
        except ServiceError as error:
            if error.code in _REFUSED:
                return None
            raise
        return _etag(answer)

    async def delete(self, key: str) -> None:
        await self._calls.call("DeleteObject", Bucket=self._bucket, Key=key)

    async def folders(self, prefix: str) -> list[str]:
        """The names of the folders directly under a prefix."""
        names: list[str] = []
        token: str | None = None
        while True:
            page = await self._calls.call(
                "ListObjectsV2", Bucket=self._bucket, Prefix=prefix, Delimiter="/", ContinuationToken=token
            )
            names += [one["Prefix"][len(prefix) : -1] for one in page.get("CommonPrefixes", ())]
            token = page.get("NextContinuationToken")
            if token is None:
                return names

    def close(self) -> None:
        self._calls.close()


def _etag(answer: dict[str, object]) -> str:
    if not isinstance(etag := answer.get("ETag"), str):
        raise CodecError("the answer of S3 has no ETag")
    return etag
