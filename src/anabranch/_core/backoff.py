"""The pause before the next attempt: the one schedule for all retries.

The pause doubles with each failure, up to a limit. Jitter spreads the retries of workers that failed together.
"""

from anabranch._model.entropy import Entropy
from anabranch.policies import Retry


def backoff_ms(failures: int, entropy: Entropy, *, first_ms: float, max_ms: float, min_share: float = 0.0) -> int:
    """The pause after `failures` failures in a row, counted from 1.

    Uniform between `min_share` of the ceiling and the ceiling: 0 is full jitter, 0.5 is equal jitter.
    """
    ceiling_ms = min(max_ms, first_ms * 2.0 ** min(failures - 1, 30))
    return round(ceiling_ms * (min_share + (1.0 - min_share) * entropy.random()))


def retry_pause_ms(policy: Retry, failed_attempts: int, entropy: Entropy) -> int:
    """The pause before the next handler call, with full jitter."""
    return backoff_ms(failed_attempts, entropy, first_ms=policy.backoff * 1000, max_ms=policy.backoff_max * 1000)
