"""Which proxy stands between us and a host, by the standard variables HTTPS_PROXY, HTTP_PROXY and NO_PROXY. Pure.

The lower-case name wins over the upper-case one, as everywhere. NO_PROXY holds names (with their subdomains),
addresses, networks (10.0.0.0/8) and `*`, each perhaps with a port. The environment is an argument.
"""

from base64 import b64encode
from collections.abc import Mapping
from dataclasses import dataclass
from ipaddress import ip_address, ip_network
from urllib.parse import unquote, urlsplit

from anabranch._http.endpoint import Endpoint
from anabranch.errors import ConfigurationError

__all__ = ["Proxy", "proxy_for"]


@dataclass(frozen=True, slots=True)
class Proxy:
    host: str
    port: int
    tls: bool
    """The way to the proxy itself is encrypted."""
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
        raise ConfigurationError(f"{variable} should look like http://proxy.example.com:3128")
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
