"""A Kinesis emulator that works with the AWS SDKs: embedded in tests and the demo, or run as `anabranch serve`."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from anabranch.local.server import LocalKinesis

__all__ = ["LocalKinesis"]


def __getattr__(name: str) -> Any:
    """Imports the server on first use: the pure state needs neither sockets nor h2."""
    if name == "LocalKinesis":
        from anabranch.local.server import LocalKinesis  # noqa: PLC0415 -- lazy on purpose

        return LocalKinesis
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
