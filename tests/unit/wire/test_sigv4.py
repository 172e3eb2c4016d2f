import pytest

from anabranch._wire.sigv4 import Signer, SigningCredentials
from anabranch.errors import ConfigurationError, CredentialsError

NOW_MS = 1_440_938_160_000  # 2015-08-30T12:36:00Z
JSON = "application/x-amz-json-1.1"
CREDENTIALS = SigningCredentials("AKIDEXAMPLE", "wJalrXUtnFEMI/K7MDENG+bPxRfiCYEXAMPLEKEY")


def signer(credentials: SigningCredentials = CREDENTIALS) -> Signer:
    return Signer(credentials, region="us-east-1", service="kinesis", host="localhost:4567")


def test_the_lines_are_what_http_1_sends() -> None:
    signed = signer().sign("Kinesis_20131202.GetRecords", JSON, [b"{}"], NOW_MS)
    assert signed.amz_date == "20150830T123600Z"
    assert signed.authorization.startswith(
        "AWS4-HMAC-SHA256 Credential=AKIDEXAMPLE/20150830/us-east-1/kinesis/aws4_request, "
        "SignedHeaders=content-type;host;x-amz-date;x-amz-target, Signature="
    )
    assert signed.lines().decode() == (
        "Content-Type: application/x-amz-json-1.1\r\n"
        "Host: localhost:4567\r\n"
        "X-Amz-Target: Kinesis_20131202.GetRecords\r\n"
        "X-Amz-Date: 20150830T123600Z\r\n"
        f"Authorization: {signed.authorization}\r\n"
    )


def test_the_pairs_are_the_same_headers_in_lower_case() -> None:
    signed = signer(SigningCredentials("AKIDEXAMPLE", "secret", "token")).sign("Kinesis_20131202.X", JSON, [], NOW_MS)
    lines = [line.split(": ", 1) for line in signed.lines().decode().splitlines()]
    assert list(signed.pairs()) == [(name.lower(), value) for name, value in lines]
    assert ("x-amz-security-token", "token") in signed.pairs()
    assert "SignedHeaders=content-type;host;x-amz-date;x-amz-security-token;x-amz-target," in signed.authorization


def test_the_pieces_of_a_body_are_signed_as_the_whole() -> None:
    whole = signer().sign("Kinesis_20131202.PutRecords", JSON, [b"abcdef"], NOW_MS)
    pieces = signer().sign("Kinesis_20131202.PutRecords", JSON, [b"ab", b"", b"cdef"], NOW_MS)
    assert pieces == whole


def test_a_signer_that_is_used_again_signs_as_a_new_one_through_seconds_and_days_both_ways() -> None:
    used = signer()
    for now_ms in (NOW_MS, NOW_MS + 999, NOW_MS + 1000, NOW_MS + 86_400_000, NOW_MS, NOW_MS - 86_400_000):
        for target in ("Kinesis_20131202.GetRecords", "Kinesis_20131202.PutRecords"):
            for content_type in (JSON, "application/x-amz-cbor-1.1"):
                again = used.sign(target, content_type, [b"{}"], now_ms)
                assert again == signer().sign(target, content_type, [b"{}"], now_ms)


@pytest.mark.parametrize(
    "credentials", [SigningCredentials("", "secret"), SigningCredentials("A", "secret", "line\r\nX-Evil: 1")]
)
def test_credentials_that_would_break_a_header_are_refused_without_being_shown(credentials: SigningCredentials) -> None:
    with pytest.raises(CredentialsError, match="not allowed in a header") as raised:
        signer(credentials)
    assert "Evil" not in str(raised.value)


@pytest.mark.parametrize("region, host", [("", "localhost"), ("us east", "localhost"), ("us-east-1", "a\nb")])
def test_a_region_or_host_that_would_break_a_header_is_refused(region: str, host: str) -> None:
    with pytest.raises(ConfigurationError, match="not allowed in a header"):
        Signer(CREDENTIALS, region=region, service="kinesis", host=host)


def test_secrets_are_not_shown() -> None:
    assert repr(SigningCredentials("AKID", "secret", "token")) == "SigningCredentials('AKID', secrets not shown)"
