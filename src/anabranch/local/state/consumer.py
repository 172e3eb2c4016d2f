"""An enhanced fan-out consumer: a name registered with a stream, addressed by an ARN that holds the second of its
birth.
"""

from typing import Literal

import msgspec

__all__ = ["Consumer"]


class Consumer(msgspec.Struct, kw_only=True):
    name: str
    arn: str
    created_ms: int
    status: Literal["CREATING", "ACTIVE", "DELETING"]
    deadline_ms: int | None
    """When CREATING or DELETING is over."""
    tags: dict[str, str] = {}
    policy: str | None = None
