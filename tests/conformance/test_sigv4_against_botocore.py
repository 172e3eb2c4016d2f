"""Our signer gives byte for byte the signatures of botocore, for random requests, one signer used for several."""

from datetime import UTC, datetime
from unittest import mock

import botocore.auth
from botocore.auth import SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials
from hypothesis import given, strategies as st

from anabranch._wire.sigv4 import Signer, SigningCredentials

visible = st.text(st.characters(min_codepoint=33, max_codepoint=126), min_size=1, max_size=60)
name = st.from_regex(r"[a-zA-Z0-9_.-]{1,40}", fullmatch=True)
hosts = st.one_of(
    st.from_regex(r"[a-z][a-z0-9-]{0,20}(\.[a-z][a-z0-9-]{0,20}){0,4}", fullmatch=True),
    st.ip_addresses(v=4).map(str),
    st.ip_addresses(v=6).map(lambda address: f"[{address}]"),
)
ports = st.none() | st.integers(min_value=1024, max_value=65535)
calls = st.tuples(
    name,
    st.sampled_from(["application/x-amz-json-1.1", "application/x-amz-cbor-1.1", "application/x-amz-json-1.0"]),
    st.lists(st.binary(max_size=200), max_size=4),
    st.integers(min_value=0, max_value=4_000_000_000_000),
)


def botocore_headers(
    credentials: SigningCredentials, region: str, service: str, host: str, call: tuple[str, str, list[bytes], int]
) -> dict[str, str]:
    target, content_type, body, now_ms = call
    request = AWSRequest(
        method="POST",
        url=f"https://{host}/",
        headers={"Content-Type": content_type, "X-Amz-Target": target, "User-Agent": "not signed"},
        data=b"".join(body),
    )
    auth = SigV4Auth(
        Credentials(credentials.access_key_id, credentials.secret_access_key, credentials.session_token),
        service,
        region,
    )
    now = datetime.fromtimestamp(now_ms // 1000, UTC).replace(tzinfo=None)
    if hasattr(botocore.auth, "get_current_datetime"):
        clock = mock.patch("botocore.auth.get_current_datetime", return_value=now)
    else:  # botocore before 1.40
        clock = mock.patch("botocore.auth.datetime.datetime", mock.Mock(utcnow=lambda: now))
    with clock:
        auth.add_auth(request)
    return dict(request.headers.items())


@given(
    access_key_id=visible,
    secret_access_key=visible,
    session_token=st.none() | visible,
    region=name,
    service=st.sampled_from(["kinesis", "dynamodb", "sqs"]),
    host=hosts,
    port=ports,
    many_calls=st.lists(calls, min_size=1, max_size=5),
)
def test_random_requests_are_signed_as_botocore_signs_them(
    access_key_id, secret_access_key, session_token, region, service, host, port, many_calls
) -> None:
    credentials = SigningCredentials(access_key_id, secret_access_key, session_token)
    host_header = host if port is None else f"{host}:{port}"
    signer = Signer(credentials, region=region, service=service, host=host_header)
    for call in many_calls:
        ours = dict(signer.sign(*call).pairs())
        theirs = botocore_headers(credentials, region, service, host_header, call)
        assert ours["authorization"] == theirs["Authorization"]
        assert ours["x-amz-date"] == theirs["X-Amz-Date"]
        assert ours.get("x-amz-security-token") == theirs.get("X-Amz-Security-Token")
        assert ours["host"] == host_header
