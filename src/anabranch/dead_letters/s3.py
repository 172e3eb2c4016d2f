"""Dead letters as objects of an S3 bucket.

The names of the objects sort as the records do, so a listing has the letters in order. A letter that is written again
finds its object there (`If-None-Match`). The lock of a redrive is one more object, with an owner and an expiry; it is
changed only if nobody else has changed it (`If-Match`).
"""

import asyncio
import json
import time
from collections.abc import AsyncGenerator, Collection
from typing import Any, Final
from urllib.parse import quote, unquote, urlsplit

from anabranch._aws.account import AwsAccount
from anabranch._aws.control import BotocoreCalls
from anabranch.config import Aws
from anabranch.dead_letters.destinations import HOLD_SECONDS, LetterBox, StoredLetter, retention_warnings, translated
from anabranch.errors import AnabranchError, CodecError, DeadLetterError, ServiceError
from anabranch.letters import Letter, decode_letter, encode_letter, stream_order

PAGE: Final = 1_000
_SUFFIX: Final = ".json"
_FETCHED_TOGETHER: Final = 4
_CONFLICT: Final = frozenset({"ConditionalRequestConflict", "409"})
_LOST: Final = frozenset({"PreconditionFailed", "412"})
_GONE: Final = frozenset({"NoSuchKey"})


class S3Letters(LetterBox):
    def __init__(
        self,
        bucket: str,
        prefix: str,
        *,
        aws: Aws | None = None,
        region: str | None = None,
        endpoint_url: str | None = None,
    ) -> None:
        self._bucket = bucket
        self._prefix = f"{prefix}/" if prefix else ""
        self._account = AwsAccount(aws)
        self._calls = BotocoreCalls(self._account, "s3", region=region, endpoint_url=endpoint_url)
        self._region = region
        self._owner: str | None = None
        self._lock_tag: str | None = None
        self.unreadable: list[str] = []

    def __str__(self) -> str:
        return f"s3://{self._bucket}/{self._prefix}".rstrip("/")

    async def check(self, retention_hours: int) -> list[str]:
        """Writes an object: there is no other way to check the permission."""
        await self._call("PutObject", Key=f"{self._prefix}.check", Body=b"")
        how = "change the bucket's lifecycle rule"
        days = await self._expiry_days()
        return [] if days is None else retention_warnings(str(self), days * 24, retention_hours, how)

    async def _expiry_days(self) -> int | None:
        try:
            answer = await self._call("GetBucketLifecycleConfiguration", expected={"NoSuchLifecycleConfiguration"})
        except DeadLetterError as error:
            if error.code != "access_denied":
                raise
            return None  # letters can still be written
        rules = [rule for rule in answer.get("Rules", []) if rule.get("Status") == "Enabled"]
        days = [
            rule["Expiration"]["Days"]
            for rule in rules
            if "Days" in rule.get("Expiration", {}) and self._prefix.startswith(_rule_prefix(rule))
        ]
        return min(days, default=None)

    def pointer(self, letter: Letter) -> str:
        """Without an endpoint: a letter may be anybody's, and its pointer must not send us to their server."""
        region = "" if self._region is None else f"?region={self._region}"
        return f"s3://{self._bucket}/{quote(self._object_key(letter))}{region}"

    async def fetch(self, pointer: str) -> StoredLetter | None:
        key = unquote(urlsplit(pointer).path).removeprefix("/")
        body, tag = await self._get(key)
        return None if body is None else StoredLetter(decode_letter(body), (key, tag))

    def _object_key(self, letter: Letter) -> str:
        return f"{self._prefix}{stream_order(letter)}.{letter.idempotency_key}{_SUFFIX}"

    async def write(self, letter: Letter) -> None:
        key, body = self._object_key(letter), encode_letter(letter)
        if await self._put(key, body, IfNoneMatch="*") is not None or not letter.redrive_count:
            return
        stored, tag = await self._get(key)
        if stored is not None and decode_letter(stored).redrive_count < letter.redrive_count:
            await self._put(key, body, IfMatch=tag)

    async def count(self) -> int:
        return sum([len(keys) async for keys in self._pages()])

    async def hold(self, owner: str) -> None:
        key, now = f"{self._prefix}.redrive-lock", time.time()
        mine = json.dumps({"owner": owner, "expires_seconds": now + HOLD_SECONDS}).encode()
        tag = await self._put(key, mine, IfNoneMatch="*")
        if tag is None:
            body, found_tag = await self._get(key)
            held = json.loads(body or "{}")
            if held.get("owner") != owner and held.get("expires_seconds", 0) > now:
                left = held["expires_seconds"] - now
                raise DeadLetterError(
                    f"{self} is being redriven by {held['owner']}",
                    code="locked",
                    advice=f"wait until it has ended; if it was killed, for {left:.0f} s",
                )
            if found_tag is not None:  # otherwise it was deleted meanwhile, and others may see that, too
                tag = await self._put(key, mine, IfMatch=found_tag)
        if tag is None:
            raise DeadLetterError(f"{self} is being redriven by somebody else", code="locked", advice="wait")
        self._owner, self._lock_tag = owner, tag

    async def release(self) -> None:
        if self._owner is not None:
            body = json.dumps({"owner": self._owner, "expires_seconds": 0}).encode()
            await self._put(f"{self._prefix}.redrive-lock", body, IfMatch=self._lock_tag)
            self._owner = None

    async def read(self) -> AsyncGenerator[StoredLetter, None]:
        self.unreadable.clear()
        async for keys in self._pages():
            for start in range(0, len(keys), _FETCHED_TOGETHER):
                group = keys[start : start + _FETCHED_TOGETHER]
                bodies = await asyncio.gather(*map(self._get, group))
                for key, (body, tag) in zip(group, bodies, strict=True):
                    if body is None:
                        continue  # deleted meanwhile
                    try:
                        yield StoredLetter(decode_letter(body), (key, tag))
                    except CodecError as error:
                        self.unreadable.append(f"object {key}: {error}")

    async def _pages(self) -> AsyncGenerator[list[str], None]:
        token: str | None = None
        while True:
            page = await self._call("ListObjectsV2", Prefix=self._prefix, MaxKeys=PAGE, ContinuationToken=token)
            yield [found["Key"] for found in page.get("Contents", []) if found["Key"].endswith(_SUFFIX)]
            token = page.get("NextContinuationToken")
            if token is None:
                return

    async def begin(self, stored: StoredLetter, letter: Letter) -> StoredLetter:
        key, tag = stored.handle
        written_tag = await self._put(key, body := encode_letter(letter), IfMatch=tag)
        if written_tag is None:
            found, found_tag = await self._get(key)
            if found is not None and found != body:  # not our own write, whose answer was lost
                raise DeadLetterError(f"{self}: {key} was changed by somebody else", code="locked", advice="wait")
            written_tag = found_tag
        return StoredLetter(letter, (key, written_tag))

    async def replace(self, stored: StoredLetter, letter: Letter) -> None:
        key, tag = stored.handle
        if tag is not None:  # otherwise it was gone when its delivery began
            await self._put(key, encode_letter(letter), IfMatch=tag)

    async def delete(self, stored: StoredLetter) -> None:
        await self._call("DeleteObject", Key=stored.handle[0])

    async def close(self) -> None:
        self._calls.close()
        self._account.close()

    async def _get(self, key: str) -> tuple[bytes | None, str | None]:
        """The body and its tag; None if there is no such object."""
        answer = await self._call("GetObject", expected=_GONE, Key=key)
        return answer.get("Body"), answer.get("ETag")

    async def _put(self, key: str, body: bytes, **condition: str | None) -> str | None:
        """The tag of the new object; None if the condition did not hold."""
        answer = await self._call("PutObject", expected=_LOST | _GONE, Key=key, Body=body, **condition)
        return answer.get("ETag")

    async def _call(self, operation: str, *, expected: Collection[str] = (), **parameters: Any) -> dict[str, Any]:
        """The answer is empty if the call fails with one of the expected codes."""
        try:
            return await self._calls.call(operation, Bucket=self._bucket, **parameters)
        except AnabranchError as error:
            code = error.code if isinstance(error, ServiceError) else ""
            if code in expected:
                return {}
            if code in _CONFLICT:  # another write is in progress, and may still fail
                raise DeadLetterError(f"{self}: another write is in progress", code="no_answer") from error
            raise translated(error, str(self)) from error


def _rule_prefix(rule: dict[str, Any]) -> str:
    """The prefix of a lifecycle rule. A rule by tag or size gets one that none of our objects has."""
    given = rule.get("Filter", {})
    prefix: str = rule.get("Prefix", given.get("Prefix", "" if not given else "\0"))
    return prefix
