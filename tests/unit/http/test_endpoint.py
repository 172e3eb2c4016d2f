import base64

import pytest

from anabranch._http.client.dialer import parse_endpoint, proxy_for
from anabranch.errors import ConfigurationError

KINESIS = parse_endpoint("https://kinesis.eu-west-1.amazonaws.com")
CLEAR = parse_endpoint("http://10.1.2.3:4567")


@pytest.fixture
def found(monkeypatch):
    """`proxy_for(endpoint)` with these variables in the environment."""

    def find(endpoint, environment):
        with monkeypatch.context() as patched:
            for name, value in environment.items():
                patched.setenv(name, value)
            return proxy_for(endpoint)

    return find


def test_the_scheme_of_the_endpoint_chooses_the_variable(found):
    environment = {"HTTPS_PROXY": "http://secure:3128", "HTTP_PROXY": "clear:8080"}
    assert repr(found(KINESIS, environment)) == "Proxy(secure:3128)"
    assert repr(found(CLEAR, environment)) == "Proxy(clear:8080)"
    assert found(KINESIS, {}) is None
    assert found(KINESIS, {"HTTPS_PROXY": ""}) is None


def test_the_lower_case_name_wins_and_cgi_is_not_trusted(found):
    assert found(KINESIS, {"https_proxy": "http://low:1", "HTTPS_PROXY": "http://up:2"}).host == "low"
    assert found(CLEAR, {"HTTP_PROXY": "http://attacker:1", "REQUEST_METHOD": "POST"}) is None
    assert found(CLEAR, {"http_proxy": "http://ours:1", "REQUEST_METHOD": "POST"}).host == "ours"


def test_user_and_password_become_a_header_and_are_never_shown(found):
    proxy = found(KINESIS, {"HTTPS_PROXY": "https://me:p%40ss@proxy"})
    assert proxy.authorization == "Basic " + base64.b64encode(b"me:p@ss").decode()
    assert (proxy.port, proxy.tls) == (443, True)
    assert "p@ss" not in repr(proxy)


@pytest.mark.parametrize("url", ["socks5://proxy:1", "http://", "http://proxy:99999", "http://[", "http://a..b"])
def test_what_is_no_http_proxy_is_refused_without_its_password(found, url):
    with pytest.raises(ConfigurationError, match="HTTPS_PROXY is not a valid proxy URL"):
        found(KINESIS, {"HTTPS_PROXY": url})


@pytest.mark.parametrize(
    "no_proxy, url, bypassed",
    [
        ("*", "https://anything", True),
        ("amazonaws.com", "https://kinesis.eu-west-1.amazonaws.com", True),
        (".amazonaws.com", "https://kinesis.eu-west-1.amazonaws.com", True),
        ("aws.com", "https://kinesis.eu-west-1.amazonaws.com", False),
        ("other.com, localhost", "https://localhost:4567", True),
        ("localhost:4567", "https://localhost:4567", True),
        ("localhost:4568", "https://localhost:4567", False),
        ("10.1.2.3", "https://10.1.2.3", True),
        ("[::1]", "https://[::1]:443", True),
        ("[::1]:8443", "https://[::1]:8443", True),
        ("[::1]:8443", "https://[::1]:443", False),
    ],
)
def test_hosts_that_need_no_proxy_are_named(found, no_proxy, url, bypassed):
    environment = {"HTTPS_PROXY": "http://proxy:1", "NO_PROXY": no_proxy}
    assert (found(parse_endpoint(url), environment) is None) == bypassed


@pytest.mark.parametrize(
    "url, host_header, authority",
    [
        (
            "https://kinesis.eu-west-1.amazonaws.com",
            "kinesis.eu-west-1.amazonaws.com",
            "kinesis.eu-west-1.amazonaws.com:443",
        ),
        ("https://kinesis.example:443/", "kinesis.example", "kinesis.example:443"),
        ("http://localhost:4567", "localhost:4567", "localhost:4567"),
        ("http://[::1]:80", "[::1]", "[::1]:80"),
        ("http://bücher.example", "xn--bcher-kva.example", "xn--bcher-kva.example:80"),
    ],
)
def test_a_host_is_written_as_headers_and_signatures_want_it(url, host_header, authority):
    endpoint = parse_endpoint(url)
    assert (endpoint.host_header, endpoint.authority) == (host_header, authority)
    assert parse_endpoint(endpoint.url) == endpoint


@pytest.mark.parametrize(
    "url",
    [
        "x",
        "http://",
        "ftp://h",
        "http://h/path",
        "http://h?q",
        "http://u:p@h",
        "http://h:0x",
        "http://[::1",
        "http://a..b",
    ],
)
def test_what_is_no_endpoint_is_refused_by_name(url):
    with pytest.raises(ValueError, match="endpoint"):
        parse_endpoint(url)
