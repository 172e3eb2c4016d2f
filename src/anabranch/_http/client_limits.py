"""What one server may cost a client: sizes, counts and times, each with a default that the service never reaches.

They protect the process from a broken or hostile answer: nothing is allocated, kept or waited for beyond them.
"""

from dataclasses import dataclass

__all__ = ["ClientLimits", "ClientTimeouts"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientTimeouts:
    connect: float = 5.0
    """For name, TCP, proxy and TLS together."""
    read: float = 15.0
    """The longest silence inside an answer."""
    message: float = 30.0
    """The longest wait for something whole inside a stream; a subscription says something every five seconds."""
    total: float = 30.0
    """From the call to the last byte of its answer, waiting for a free connection included."""
    idle: float = 20.0
    """How long an unused connection is kept: less than servers and the balancers before them usually do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientLimits:
    head_bytes_max: int = 64 << 10
    """Status line and headers together."""
    body_bytes_max: int = 64 << 20
    """GetRecords returns up to 10 MiB of data: 14 MiB as base64, and up to 10,000 partition keys beside it."""
    interim_answers_max: int = 8
    """Answers of the 1xx kind before the real one."""
    kept_buffer_bytes_max: int = 32 << 20
    """Large receive buffers that a client keeps for its next large answers."""
