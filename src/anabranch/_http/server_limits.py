"""What one client may cost a server: sizes, counts and times, each with a default that no honest client meets.

They protect the other clients of the same server. They are not AWS's quotas, of which this package knows nothing.
"""

from dataclasses import dataclass

__all__ = ["ServerLimits"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerLimits:
    connections_max: int = 2_000
    head_bytes_max: int = 64 << 10
    """Request line and headers together."""
    body_bytes_max: int = 24 << 20
    """A PutRecords of 10 MiB is 14 MiB as base64, and a careless encoder escapes some of it."""
    streams_max: int = 256
    """Requests at once on one HTTP/2 connection."""
    head_timeout: float = 10.0
    """From a request's first byte to its last header; for a new TLS connection, to the end of the handshake."""
    body_timeout: float = 60.0
    idle_timeout: float = 300.0
    """Between requests on a kept connection."""
    write_timeout: float = 330.0
    """How long a client may leave an answer unread; above the five minutes of a paused subscription."""
    check_interval: float = 1.0
    """How often connections are looked at for these times."""
