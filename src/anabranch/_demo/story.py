"""What happens when, if nobody presses a key."""

from typing import Final, Literal

__all__ = ["KEYS", "STORY", "Action"]

Action = Literal["split", "kill", "merge", "throttle"]

STORY: Final[tuple[tuple[float, Action], ...]] = (
    (0.14, "split"),
    (0.30, "kill"),
    (0.46, "merge"),
    (0.58, "throttle"),
    (0.70, "split"),
    (0.80, "merge"),
)
"""As parts of the time in which records are written."""

KEYS: Final[dict[str, Action]] = {"s": "split", "m": "merge", "k": "kill", "t": "throttle"}
