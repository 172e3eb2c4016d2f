"""Where a server is: scheme, host and port, read from a URL once and checked there."""

from dataclasses import dataclass
from urllib.parse import urlsplit

__all__ = ["Endpoint", "parse_endpoint"]

_DEFAULT_PORTS = {"http": 80, "https": 443}


@dataclass(frozen=True, slots=True)
class Endpoint:
    scheme: str
    host: str
    """A name or an address; IPv6 without brackets."""
    port: int

    @property
    def tls(self) -> bool:
        return self.scheme == "https"

    @property
    def authority(self) -> str:
        """Host and port as CONNECT wants them: the port always, IPv6 in brackets."""
        return f"{self._bracketed}:{self.port}"

    @property
    def host_header(self) -> str:
        """As the Host header and the signature want it: the port only where it is not the scheme's own."""
        return self._bracketed if self.port == _DEFAULT_PORTS[self.scheme] else self.authority

    @property
    def url(self) -> str:
        return f"{self.scheme}://{self.host_header}"

    @property
    def _bracketed(self) -> str:
        return f"[{self.host}]" if ":" in self.host else self.host


def parse_endpoint(url: str) -> Endpoint:
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise ValueError(
            f"an endpoint looks like https://kinesis.eu-west-1.amazonaws.com, not {url!r}: {error}"
        ) from None
    if parts.scheme not in _DEFAULT_PORTS or not parts.hostname or parts.username is not None:
        raise ValueError(f"an endpoint looks like https://kinesis.eu-west-1.amazonaws.com, not {url!r}")
    if parts.path not in {"", "/"} or parts.query or parts.fragment:
        raise ValueError(f"an endpoint is a scheme, a host and perhaps a port, with no path behind: not {url!r}")
    return Endpoint(parts.scheme, parts.hostname, port or _DEFAULT_PORTS[parts.scheme])
