"""Dead letters in an SQS queue, standard or FIFO.

SQS has no list: reading receives messages, which hides them from others for a while and raises their receive count.
That hiding is also the lock of a redrive. What was not deleted is made visible again at the end; after a crash it comes
back by itself. A standard queue may deliver a message twice and takes two with one key, so readers merge letters by
their idempotency key.
"""

import asyncio
import hashlib
import json
from collections.abc import AsyncGenerator, Iterable
from contextlib import suppress
from time import monotonic
from typing import Any, Final

import msgspec

from anabranch._aws.account import AwsAccount
from anabranch._aws.control import BotocoreCalls
from anabranch.config import Aws
from anabranch.dead_letters.destinations import HOLD_SECONDS, StoredLetter, retention_warnings, translated
from anabranch.errors import AnabranchError, CodecError, DeadLetterError
from anabranch.letters import Letter, decode_letter, encode_letter, stream_order

ROUND_LETTERS_MAX: Final = 10_000  # SQS hides at most 120,000 messages of a queue
_ROUND_BYTES_MAX: Final = 64 << 20
_FINISHED_MAX: Final = 100_000
WAIT_SECONDS: Final = 1
"""A long poll asks all of SQS's servers. The answer to a short one may be empty although there are letters."""
KNOWN_ANSWERS_MAX: Final = 100
"""A read ends after so many responses in a row without a new message: in a large queue, the first messages become
visible again before all are held.
"""
_MESSAGE_BYTES: Final = 1 << 20  # SQS's own limit (August 2025); a queue may set a lower one


class _Queue(msgspec.Struct, frozen=True):
    url: str
    message_bytes_max: int
    retention_hours: float


class SqsLetters:
    def __init__(
        self, name: str, *, aws: Aws | None = None, region: str | None = None, endpoint_url: str | None = None
    ) -> None:
        self._name = name
        self._is_fifo = self.reveals_more = name.endswith(".fifo")
        self._account = AwsAccount(aws)
        self._calls = BotocoreCalls(self._account, "sqs", region=region, endpoint_url=endpoint_url)
        self._queue: _Queue | None = None
        self._receipts: dict[str, str] = {}
        """The receipt handle of each message that we hold, by message id."""
        self._renewed_at = 0.0
        self._finished: set[str] = set()
        """The idempotency keys of the letters that this object has deleted: a second copy may still arrive."""
        self._is_drained = False
        """Whether the last response had no messages, or many in a row had no new one."""
        self.unreadable: list[str] = []

    def __str__(self) -> str:
        return f"sqs://{self._name}"

    async def check(self, retention_hours: int) -> list[str]:
        self._queue = None
        queue = await self._opened()
        how = "raise the queue's MessageRetentionPeriod (14 days at most)"
        return retention_warnings(str(self), queue.retention_hours, retention_hours, how)

    async def limit_bytes(self) -> int | None:
        return (await self._opened()).message_bytes_max

    async def write(self, letter: Letter) -> None:
        fifo = {}
        if self._is_fifo:
            key = json.dumps([letter.app, letter.stream, letter.partition_key])
            group = hashlib.sha256(key.encode()).hexdigest()  # a group id is ASCII of at most 128 characters
            fifo = {
                "MessageGroupId": group,
                "MessageDeduplicationId": f"{letter.idempotency_key}-{letter.redrive_count}",
            }
        try:
            await self._call_queue("SendMessage", MessageBody=encode_letter(letter).decode(), **fifo)
        except AnabranchError:
            self._queue = None  # it may have been created again, or with other limits
            raise

    async def count(self) -> int:
        wanted = "ApproximateNumberOfMessages"
        answer = await self._call_queue("GetQueueAttributes", AttributeNames=[wanted])
        return int(answer["Attributes"][wanted])

    async def hold(self, owner: str) -> None:  # noqa: ARG002 -- the receiver of a message holds it
        self._renewed_at = monotonic()
        await self._change_visibility(round(HOLD_SECONDS))

    async def _renew_if_due(self) -> None:
        """A large queue takes longer to read than its messages are held."""
        if monotonic() - self._renewed_at > HOLD_SECONDS / 3:
            with suppress(DeadLetterError):  # messages that become visible meanwhile are recognised
                await self.hold("")

    async def release(self) -> None:
        await self._change_visibility(0)
        self._receipts.clear()

    async def read(self) -> AsyncGenerator[StoredLetter, None]:
        """In rounds, each in stream order. A FIFO queue hides what follows a held message of the same key until that
        is deleted.
        """
        self._is_drained = False
        self._renewed_at = monotonic()
        self.unreadable.clear()
        while not self._is_drained:
            for stored in await self._round():
                yield stored
                await self._renew_if_due()

    async def _round(self) -> list[StoredLetter]:
        found: dict[str, tuple[Letter, list[str]]] = {}
        size = known_answers = 0
        while len(found) < ROUND_LETTERS_MAX and size < _ROUND_BYTES_MAX:
            await self._renew_if_due()
            messages = await self._receive()
            is_new = any(message["MessageId"] not in self._receipts for message in messages)
            known_answers = 0 if is_new else known_answers + 1
            self._is_drained = not messages or known_answers > KNOWN_ANSWERS_MAX
            if self._is_drained:
                break
            for message in messages:
                is_known = message["MessageId"] in self._receipts
                self._receipts[message["MessageId"]] = message["ReceiptHandle"]
                letter = None if is_known else self._letter(message)
                if letter is None:
                    continue
                if letter.idempotency_key in self._finished:
                    await self._delete([message["MessageId"]])
                    continue
                size += len(message["Body"])
                other, ids = found.get(letter.idempotency_key, (letter, []))
                best = max(letter, other, key=lambda one: (one.redrive_count, not one.recovered))
                found[letter.idempotency_key] = (best, [*ids, message["MessageId"]])
        return [StoredLetter(*one) for one in sorted(found.values(), key=lambda one: stream_order(one[0]))]

    async def _receive(self) -> list[dict[str, Any]]:
        answer = await self._call_queue(
            "ReceiveMessage",
            MaxNumberOfMessages=10,
            VisibilityTimeout=round(HOLD_SECONDS),
            WaitTimeSeconds=WAIT_SECONDS,
        )
        messages: list[dict[str, Any]] = answer.get("Messages", [])
        return messages

    def _letter(self, message: dict[str, Any]) -> Letter | None:
        try:
            return decode_letter(message["Body"])
        except CodecError as error:
            self.unreadable.append(f"message {message['MessageId']}: {error}")
            return None

    async def begin(self, stored: StoredLetter, letter: Letter) -> StoredLetter:
        """Writes nothing: a message cannot be changed, and its receive count also counts those who list letters."""
        return StoredLetter(letter, stored.handle)

    async def replace(self, stored: StoredLetter, letter: Letter) -> None:
        """A message cannot be changed: sends a new one, then deletes the old one. In a FIFO queue the new one would be
        behind the later letters of its key, so the old one is kept.
        """
        if self._is_fifo or letter.redrive_count == stored.letter.redrive_count:
            return
        await self.write(letter)
        await self._delete(stored.handle)

    async def delete(self, stored: StoredLetter) -> None:
        await self._delete(stored.handle)
        if len(self._finished) >= _FINISHED_MAX:
            self._finished.clear()
        self._finished.add(stored.letter.idempotency_key)

    async def close(self) -> None:
        self._calls.close()
        self._account.close()

    async def _delete(self, message_ids: Iterable[str]) -> None:
        for message_id in message_ids:
            if (receipt := self._receipts.get(message_id)) is not None:
                await self._call_queue("DeleteMessage", ReceiptHandle=receipt)
                del self._receipts[message_id]

    async def _change_visibility(self, seconds: int) -> None:
        """Of all messages that we hold. Ignores the entries that fail: those messages are gone."""
        entries = [
            {"Id": str(number % 10), "ReceiptHandle": receipt, "VisibilityTimeout": seconds}
            for number, receipt in enumerate(self._receipts.values())
        ]
        calls = [
            self._call_queue("ChangeMessageVisibilityBatch", Entries=entries[start : start + 10])
            for start in range(0, len(entries), 10)
        ]
        await asyncio.gather(*calls)  # a few at once: the client has as many threads

    async def _opened(self) -> _Queue:
        if self._queue is None:
            url = (await self._call("GetQueueUrl", QueueName=self._name))["QueueUrl"]
            wanted = ["MaximumMessageSize", "MessageRetentionPeriod"]
            answer = await self._call("GetQueueAttributes", QueueUrl=url, AttributeNames=wanted)
            attributes = answer.get("Attributes", {})
            self._queue = _Queue(
                url,
                int(attributes.get("MaximumMessageSize", _MESSAGE_BYTES)),
                int(attributes.get("MessageRetentionPeriod", 345_600)) / 3600,
            )
        return self._queue

    async def _call_queue(self, operation: str, **parameters: Any) -> dict[str, Any]:
        return await self._call(operation, QueueUrl=(await self._opened()).url, **parameters)

    async def _call(self, operation: str, **parameters: Any) -> dict[str, Any]:
        try:
            return await self._calls.call(operation, **parameters)
        except AnabranchError as error:
            raise translated(error, str(self)) from error
