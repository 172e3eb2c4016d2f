"""Retries for small calls that are safe to repeat, such as ListShards and DescribeStreamSummary.

Retries are never nested: the client sends a call once, and the engine has its own retries. Delays have full jitter. All
calls share a budget: retries spend it and successes refill it, so retries do not overload a failing service.
"""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Final, TypeVar

from anabranch._core.backoff import backoff_ms
from anabranch._model.entropy import Entropy
from anabranch._ports import Clock
from anabranch.errors import ServiceError, ThrottledError, TransportError, UnavailableError

T = TypeVar("T")

_RETRY_AFTER_MS_MAX: Final = 60_000


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryPolicy:
    attempts_max: int = 5
    first_delay_ms: int = 100
    delay_ms_max: int = 10_000

    def delay_ms(self, failures: int, entropy: Entropy, retry_after_seconds: float | None = None) -> int:
        """The delay after `failures` failures. It is at least the service's Retry-After, of up to a minute."""
        jittered = backoff_ms(failures, entropy, first_ms=self.first_delay_ms, max_ms=self.delay_ms_max)
        if retry_after_seconds is None:
            return jittered
        return max(jittered, min(round(retry_after_seconds * 1000), _RETRY_AFTER_MS_MAX))


class RetryBudget:
    """A token bucket: a retry costs several tokens, a success earns one."""

    def __init__(self, tokens_max: int = 500, *, retry_cost: int = 5, transport_cost: int = 10) -> None:
        self._tokens_max = tokens_max
        self._tokens = tokens_max
        self._retry_cost = retry_cost
        self._transport_cost = transport_cost

    @property
    def tokens(self) -> int:
        return self._tokens

    def spend(self, error: Exception) -> bool:
        """False if the budget does not allow another attempt. A transport error costs more than an error response."""
        cost = self._transport_cost if isinstance(error, TransportError) else self._retry_cost
        if cost > self._tokens:
            return False
        self._tokens -= cost
        return True

    def earn(self) -> None:
        self._tokens = min(self._tokens_max, self._tokens + 1)


class Retries:
    def __init__(
        self, clock: Clock, entropy: Entropy, *, policy: RetryPolicy | None = None, budget: RetryBudget | None = None
    ) -> None:
        self._clock = clock
        self._entropy = entropy
        self._policy = policy or RetryPolicy()
        self._budget = budget or RetryBudget()

    async def call(self, attempt: Callable[[], Awaitable[T]]) -> T:
        """Returns the first success or raises the last failure. Errors that a retry cannot fix are raised at once."""
        failures = 0
        while True:
            try:
                result = await attempt()
            except (ThrottledError, UnavailableError, TransportError) as error:
                failures += 1
                if failures >= self._policy.attempts_max or not self._budget.spend(error):
                    raise
                retry_after_seconds = error.retry_after_seconds if isinstance(error, ServiceError) else None
                delay_ms = self._policy.delay_ms(failures, self._entropy, retry_after_seconds)
            else:
                self._budget.earn()
                return result
            await self._clock.sleep_until_ms(self._clock.now_ms() + delay_ms)
