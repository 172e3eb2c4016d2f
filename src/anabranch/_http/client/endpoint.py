"""Where a server is, and which proxy is between us and it. Pure: the environment is an argument.

Proxies come from the standard variables HTTPS_PROXY, HTTP_PROXY and NO_PROXY. A lower-case variable wins over the
upper-case one. NO_PROXY holds host names (with their subdomains), addresses, networks (10.0.0.0/8) and `*`, each with
an optional port.
"""

from base64 import b64encode
from collections.abc import Mapping
from dataclasses import dataclass
from ipaddress import ip_address, ip_network
from urllib.parse import unquote, urlsplit

from anabranch.errors import ConfigurationError

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
        """As CONNECT needs it: always with the port, IPv6 in brackets."""
        return f"{self._bracketed}:{self.port}"

    @property
    def host_header(self) -> str:
        """As the Host header and the signature need it: with the port only if it is not the default of the scheme."""
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
            f"{url!r} is not a valid endpoint ({error}); use a URL like https://kinesis.eu-west-1.amazonaws.com"
        ) from None
    if parts.scheme not in _DEFAULT_PORTS or not parts.hostname or parts.username is not None:
        raise ValueError(f"{url!r} is not a valid endpoint; use a URL like https://kinesis.eu-west-1.amazonaws.com")
    if parts.path not in {"", "/"} or parts.query or parts.fragment:
        raise ValueError(
            f"an endpoint has a scheme, a host and an optional port, but no path, query or fragment: {url!r}"
        )
    return Endpoint(parts.scheme, parts.hostname, port or _DEFAULT_PORTS[parts.scheme])


@dataclass(frozen=True, slots=True)
class Proxy:
    host: str
    port: int
    tls: bool
    """The connection to the proxy itself uses TLS."""
    authorization: str | None = None
    """The value of Proxy-Authorization."""

    def __repr__(self) -> str:
        return f"Proxy({self.host}:{self.port})"  # never the password


def proxy_for(endpoint: Endpoint, environment: Mapping[str, str]) -> Proxy | None:
    variable = f"{endpoint.scheme}_proxy"
    url = environment.get(variable)
    if url is None and not (variable == "http_proxy" and "REQUEST_METHOD" in environment):
        # Under CGI, HTTP_PROXY is a header that any client may send (CVE-2016-5385).
        url = environment.get(variable.upper())
    if not url or _bypassed(endpoint, environment.get("no_proxy") or environment.get("NO_PROXY") or ""):
        return None
    return _parse(url, variable.upper())


def _parse(url: str, variable: str) -> Proxy:
    try:
        parts = urlsplit(url if "://" in url else f"http://{url}")
        host, port = parts.hostname, parts.port
    except ValueError:
        host, port = None, None
    if not host or parts.scheme not in {"http", "https"}:
        raise ConfigurationError(f"{variable} is not a valid proxy URL; use one like http://proxy.example.com:3128")
    authorization = None
    if parts.username is not None:
        pair = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
        authorization = f"Basic {b64encode(pair.encode()).decode()}"
    tls = parts.scheme == "https"
    return Proxy(host, port or (443 if tls else 80), tls, authorization)


def _bypassed(endpoint: Endpoint, no_proxy: str) -> bool:
    return any(_matches(endpoint, entry) for entry in no_proxy.replace(" ", ",").split(",") if entry)


def _matches(endpoint: Endpoint, entry: str) -> bool:
    if entry == "*":
        return True
    if "/" in entry:
        try:
            return ip_address(endpoint.host) in ip_network(entry, strict=False)
        except ValueError:
            return False
    if entry.startswith("["):
        name, _, port = entry[1:].partition("]")
        port = port.removeprefix(":")
    elif entry.count(":") == 1:
        name, _, port = entry.partition(":")
    else:
        name, port = entry, ""
    if port and port != str(endpoint.port):
        return False
    name = name.lower().removeprefix("*").removeprefix(".")
    host = endpoint.host.lower()
    return host == name or host.endswith(f".{name}")
