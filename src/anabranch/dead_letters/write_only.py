"""Destinations that are written and not read from here: another Kinesis stream, and a function of the user's."""

import inspect
from collections.abc import Awaitable, Callable
from typing import Final

from anabranch._aws.kinesis_client import KinesisByRegion
from anabranch._model.streams import StreamName
from anabranch._wire.messages import PutRecordsEntry, StreamSummary
from anabranch.config import Aws
from anabranch.dead_letters.boxes import retention_warnings, translated
from anabranch.errors import AnabranchError, ConfigurationError, DeadLetterCode, DeadLetterError
from anabranch.letters import Letter, encode_letter
from anabranch.limits import RECORD_BYTES_DEFAULT_MAX

_THROTTLED: Final = "ProvisionedThroughputExceededException"


class KinesisLetters:
    """A stream of letters, under the partition keys of their records. A letter may be in it twice: readers merge by the
    idempotency key.
    """

    def __init__(self, stream: StreamName, *, aws: Aws | None = None) -> None:
        self._stream = stream
        self._aws = aws
        self._opened: KinesisByRegion | None = None
        self._record_bytes_max = RECORD_BYTES_DEFAULT_MAX

    @property
    def _kinesis(self) -> KinesisByRegion:
        """Opened when it is first needed: it starts threads."""
        if self._opened is None:
            self._opened = KinesisByRegion(self._aws)
        return self._opened

    def __str__(self) -> str:
        return f"kinesis://{self._stream.name}"

    async def check(self, retention_hours: int) -> list[str]:
        summary = await self._summary()
        self._record_bytes_max = summary.record_bytes_max
        how = "raise its retention with `anabranch streams retention`"
        return retention_warnings(str(self), summary.retention_hours, retention_hours, how)

    async def _summary(self) -> StreamSummary:
        try:
            return await self._kinesis.describe_stream_summary(self._stream)
        except AnabranchError as error:
            raise translated(error, str(self)) from error

    async def limit_bytes(self) -> int | None:
        return self._record_bytes_max - 4 * 256  # the partition key counts, too

    async def write(self, letter: Letter) -> None:
        entry = PutRecordsEntry(encode_letter(letter), letter.partition_key or letter.idempotency_key)
        try:
            (result,) = (await self._kinesis.put_records(self._stream, [entry])).entries
        except AnabranchError as error:
            raise translated(error, str(self)) from error
        if result.error_code is not None:
            code: DeadLetterCode = "throttled" if result.error_code == _THROTTLED else "no_answer"
            raise DeadLetterError(
                f"{self} did not take the letter: {result.error_code}: {result.error_message}",
                code=code,
            )

    async def close(self) -> None:
        if self._opened is not None:
            await self._opened.close()


class FunctionLetters:
    """An async function that keeps the letter, and returns when it is durable."""

    def __init__(self, function: Callable[[Letter], Awaitable[object]]) -> None:
        """Raises `ConfigurationError` if it is not async: each letter would be written again and again."""
        self._function = function
        called = (inspect.unwrap(function), getattr(function, "__call__", None))  # noqa: B004 -- of a callable object
        if not any(map(inspect.iscoroutinefunction, called)):
            raise ConfigurationError(f"the dead letter function {self} is not async: make it an async def")

    def __str__(self) -> str:
        return str(getattr(self._function, "__qualname__", repr(self._function)))

    async def check(self, retention_hours: int) -> list[str]:  # noqa: ARG002 -- only the function knows
        return []

    async def limit_bytes(self) -> int | None:
        return None

    async def write(self, letter: Letter) -> None:
        try:
            result: object = self._function(letter)
            if inspect.isawaitable(result):
                await result
        except DeadLetterError:
            raise
        except Exception as error:
            raise DeadLetterError(
                f"the dead letter function {self} failed: {type(error).__name__}: {error}", code="no_answer"
            ) from error
        if not inspect.isawaitable(result):
            raise DeadLetterError(
                f"the dead letter function {self} is not async", code="unusable", advice="make it an async def"
            )

    async def close(self) -> None:
        """The function is the user's."""
