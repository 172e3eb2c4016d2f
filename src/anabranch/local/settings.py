"""The settings of a local Kinesis."""

import re
from typing import Literal

import msgspec

from anabranch.errors import ConfigurationError

_REGION = re.compile(r"[a-z]{2,}(-[a-z]+)+-\d+")
_ACCOUNT_ID = re.compile(r"\d{12}")


class LocalSettings(msgspec.Struct, frozen=True, kw_only=True):
    region: str = "us-east-1"
    account_id: str = "000000000000"
    limits: Literal["aws", "off"] = "off"
    """`aws` enforces AWS's rate limits and quotas; `off` does not."""
    state_delay_ms: int = 0
    """How long a stream stays CREATING, UPDATING or DELETING."""
    time_scale: float = 1.0
    """Multiplies durations (iterator and subscription lifetimes, heartbeats, retention, state delays): with 0.01, an
    iterator expires after three seconds. It does not change timestamps or rates."""

    def __post_init__(self) -> None:
        violations: list[str] = []
        if _REGION.fullmatch(self.region) is None:
            violations.append(f"region: {self.region!r} is not a region such as us-east-1")
        if _ACCOUNT_ID.fullmatch(self.account_id) is None:
            violations.append(f"account_id: {self.account_id!r} does not have 12 digits")
        if self.limits not in {"aws", "off"}:
            violations.append(f"limits: {self.limits!r} must be 'aws' or 'off'")
        if self.state_delay_ms < 0:
            violations.append(f"state_delay_ms: {self.state_delay_ms} must not be negative")
        if not self.time_scale > 0:
            violations.append(f"time_scale: {self.time_scale} must be above 0; 0.01 turns 5 minutes into 3 seconds")
        if violations:
            raise ConfigurationError(violations)

    @property
    def partition(self) -> str:
        """The AWS partition, as in the region's ARNs."""
        if self.region.startswith("cn-"):
            return "aws-cn"
        return "aws-us-gov" if self.region.startswith("us-gov-") else "aws"

    def scaled_ms(self, duration_ms: int) -> int:
        return round(duration_ms * self.time_scale)
