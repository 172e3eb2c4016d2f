"""The settings of a local Kinesis.

`time_scale` multiplies durations (iterator and subscription lifetimes, heartbeats, retention, state delays): with 0.01,
an iterator expires after three seconds. It does not change timestamps or rates.
"""

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
    state_delay_ms: int = 0
    """How long CREATING, UPDATING and DELETING last."""
    time_scale: float = 1.0
    shard_limit: int = 20_000
    """Open shards in the account. 20,000 is AWS's default in its three largest regions."""

    def __post_init__(self) -> None:
        wrong: list[str] = []
        if _REGION.fullmatch(self.region) is None:
            wrong.append(f"region: {self.region!r} is not a region such as us-east-1")
        if _ACCOUNT_ID.fullmatch(self.account_id) is None:
            wrong.append(f"account_id: {self.account_id!r} is not 12 digits")
        if self.limits not in {"aws", "off"}:
            wrong.append(f"limits: {self.limits!r} must be 'aws' or 'off'")
        if self.state_delay_ms < 0:
            wrong.append(f"state_delay_ms: {self.state_delay_ms} must not be negative")
        if not self.time_scale > 0:
            wrong.append(f"time_scale: {self.time_scale} must be above 0; 0.01 turns five minutes into three seconds")
        if self.shard_limit < 1:
            wrong.append(f"shard_limit: {self.shard_limit} must be at least 1")
        if wrong:
            raise ConfigurationError(wrong)

    @property
    def partition(self) -> str:
        """The partition in every ARN of this region."""
        if self.region.startswith("cn-"):
            return "aws-cn"
        return "aws-us-gov" if self.region.startswith("us-gov-") else "aws"

    def scaled_ms(self, duration_ms: int) -> int:
        return round(duration_ms * self.time_scale)
