"""After a failed call: when to try again, or that this was the last attempt."""

from anabranch._model.entropy import Entropy
from anabranch.policies import Retry

__all__ = ["retry_in_ms"]


def retry_in_ms(policy: Retry, failed_attempts: int, entropy: Entropy) -> int | None:
    """Full jitter over a doubling pause; None after the last attempt."""
    if failed_attempts >= policy.attempts:
        return None
    ceiling = min(policy.backoff_max, policy.backoff * 2.0 ** min(failed_attempts - 1, 30))
    return round(entropy.random() * ceiling * 1000)
