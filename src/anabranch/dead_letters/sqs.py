"""Dead letters in an SQS queue, standard or FIFO.

SQS cannot list messages. To read them is to receive them, which hides them from others for a while and raises their
receive count. A redrive also uses this as its lock. At its end it makes the messages visible that it did not delete;
after a crash they become visible when their time is up. A standard queue may deliver a message twice, and accepts two
messages with the same idempotency key. So readers merge letters by that key.
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
_DELETED_KEYS_MAX: Final = 100_000  # a limit for memory
WAIT_SECONDS: Final = 1
"""A long poll asks all of SQS's servers. The answer to a short one may be empty although there are letters."""
REPEATED_ANSWERS_MAX: Final = 100
"""A read ends after this many responses in a row that repeat messages. In a large queue, the first messages become
visible again before the last are received, so there may never be an empty response.
"""
_MESSAGE_BYTES_DEFAULT: Final = 1 << 20  # SQS's own limit (August 2025); a queue may set a lower one
_RETENTION_SECONDS_DEFAULT: Final = 4 * 24 * 3600
_BATCH_MAX: Final = 10  # messages in one request or response


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
        self._deleted_keys: set[str] = set()
        """The idempotency keys of the letters that this object has deleted. If another copy arrives, it is deleted."""
        self._is_drained = False
        """Whether reading is complete: the last response had no messages, or many in a row had no new one."""
        self.unreadable: list[str] = []

    def __str__(self) -> str:
        return f"sqs://{self._name}"

    async def check(self, retention_hours: int) -> list[str]:
        self._queue = None
        queue = await self._get_queue()
        how = "raise the queue's MessageRetentionPeriod (14 days at most)"
        return retention_warnings(str(self), queue.retention_hours, retention_hours, how)

    async def limit_bytes(self) -> int | None:
        return (await self._get_queue()).message_bytes_max

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
            self._queue = None  # the queue may have been created again, or its limits changed
            raise

    async def count(self) -> int:
        wanted = "ApproximateNumberOfMessages"
        answer = await self._call_queue("GetQueueAttributes", AttributeNames=[wanted])
        return int(answer["Attributes"][wanted])

    async def hold(self, owner: str) -> None:  # noqa: ARG002 -- SQS hides messages from all but their receiver
        self._renewed_at = monotonic()
        await self._change_visibility(round(HOLD_SECONDS))

    async def _renew_if_due(self) -> None:
        """A large queue takes longer to read than its messages are held."""
        if monotonic() - self._renewed_at > HOLD_SECONDS / 3:
            with suppress(DeadLetterError):  # if messages become visible again, `_receipts` recognises them
                await self.hold("")

    async def release(self) -> None:
        await self._change_visibility(0)
        self._receipts.clear()

    async def read(self) -> AsyncGenerator[StoredLetter, None]:
        """Reads in rounds, each in stream order. A FIFO queue hides the later messages of a key until the held ones are
        deleted.
        """
        self._is_drained = False
        self._renewed_at = monotonic()
        self.unreadable.clear()
        while not self._is_drained:
            for stored in await self._read_round():
                yield stored
                await self._renew_if_due()

    async def _read_round(self) -> list[StoredLetter]:
        found: dict[str, tuple[Letter, list[str]]] = {}
        size = repeated_answers = 0
        while len(found) < ROUND_LETTERS_MAX and size < _ROUND_BYTES_MAX:
            await self._renew_if_due()
            messages = await self._receive()
            has_new = any(message["MessageId"] not in self._receipts for message in messages)
            repeated_answers = 0 if has_new else repeated_answers + 1
            self._is_drained = not messages or repeated_answers > REPEATED_ANSWERS_MAX
            if self._is_drained:
                break
            for message in messages:
                is_known = message["MessageId"] in self._receipts
                self._receipts[message["MessageId"]] = message["ReceiptHandle"]
                letter = None if is_known else self._letter(message)
                if letter is None:
                    continue
                if letter.idempotency_key in self._deleted_keys:
                    await self._delete([message["MessageId"]])
                    continue
                size += len(message["Body"])
                other, ids = found.get(letter.idempotency_key, (letter, []))
                # Of two copies, the later one counts, or else the one with a message and a stack.
                best = max(letter, other, key=lambda copy: (copy.redrive_count, not copy.recovered))
                found[letter.idempotency_key] = (best, [*ids, message["MessageId"]])
        return [StoredLetter(letter, ids) for letter, ids in sorted(found.values(), key=lambda it: stream_order(it[0]))]

    async def _receive(self) -> list[dict[str, Any]]:
        answer = await self._call_queue(
            "ReceiveMessage",
            MaxNumberOfMessages=_BATCH_MAX,
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
        """Stores nothing: a message cannot be changed. SQS's receive count is no substitute, because listing letters
        raises it too.
        """
        return StoredLetter(letter, stored.handle)

    async def replace(self, stored: StoredLetter, letter: Letter) -> None:
        """A message cannot be changed: sends a new one, then deletes the old one. In a FIFO queue the new one would be
        behind the later letters of its key, so the old one is kept unchanged.
        """
        if self._is_fifo or letter.redrive_count == stored.letter.redrive_count:
            return  # with the same `redrive_count` there is nothing to undo: `begin` stored nothing
        await self.write(letter)
        await self._delete(stored.handle)

    async def delete(self, stored: StoredLetter) -> None:
        await self._delete(stored.handle)
        if len(self._deleted_keys) >= _DELETED_KEYS_MAX:
            self._deleted_keys.clear()
        self._deleted_keys.add(stored.letter.idempotency_key)

    async def close(self) -> None:
        self._calls.close()
        self._account.close()

    async def _delete(self, message_ids: Iterable[str]) -> None:
        for message_id in message_ids:
            if (receipt := self._receipts.get(message_id)) is not None:
                await self._call_queue("DeleteMessage", ReceiptHandle=receipt)
                del self._receipts[message_id]

    async def _change_visibility(self, seconds: int) -> None:
        """Changes all messages that we hold. Ignores single failures: those messages are gone."""
        entries = [
            {"Id": str(number % _BATCH_MAX), "ReceiptHandle": receipt, "VisibilityTimeout": seconds}
            for number, receipt in enumerate(self._receipts.values())
        ]
        calls = [
            self._call_queue("ChangeMessageVisibilityBatch", Entries=entries[start : start + _BATCH_MAX])
            for start in range(0, len(entries), _BATCH_MAX)
        ]
        await asyncio.gather(*calls)  # the client's thread pool limits how many run at once

    async def _get_queue(self) -> _Queue:
        if self._queue is None:
            url = (await self._call("GetQueueUrl", QueueName=self._name))["QueueUrl"]
            wanted = ["MaximumMessageSize", "MessageRetentionPeriod"]
            answer = await self._call("GetQueueAttributes", QueueUrl=url, AttributeNames=wanted)
            attributes = answer.get("Attributes", {})
            self._queue = _Queue(
                url,
                int(attributes.get("MaximumMessageSize", _MESSAGE_BYTES_DEFAULT)),
                int(attributes.get("MessageRetentionPeriod", _RETENTION_SECONDS_DEFAULT)) / 3600,
            )
        return self._queue

    async def _call_queue(self, operation: str, **parameters: Any) -> dict[str, Any]:
        return await self._call(operation, QueueUrl=(await self._get_queue()).url, **parameters)

    async def _call(self, operation: str, **parameters: Any) -> dict[str, Any]:
        try:
            return await self._calls.call(operation, **parameters)
        except AnabranchError as error:
            raise translated(error, str(self)) from error
