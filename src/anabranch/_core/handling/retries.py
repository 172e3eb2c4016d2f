"""After a failed call: when to try again, or that this was the last attempt."""

from anabranch._core.backoff import backoff_ms
from anabranch._model.entropy import Entropy
from anabranch.policies import Retry

__all__ = ["retry_in_ms"]


def retry_in_ms(policy: Retry, failed_attempts: int, entropy: Entropy) -> int | None:
    """The pause before the next attempt, with full jitter; None after the last attempt."""
    if failed_attempts >= policy.attempts:
        return None
    return backoff_ms(failed_attempts, entropy, first_ms=policy.backoff * 1000, max_ms=policy.backoff_max * 1000)
