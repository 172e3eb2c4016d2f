"""The local Kinesis and its admin endpoint over raw HTTP: the checks that come before any operation."""

import http.client
import json

import pytest

from anabranch.local.errors import LocalError
from anabranch.local.http import check_signature_form, is_local_host
from patience import PATIENCE

AUTHORIZATION = (
    "AWS4-HMAC-SHA256 Credential=a/20261116/us-east-1/kinesis/aws4_request, SignedHeaders=host, Signature=00"
)
SIGNED = {
    "content-type": "application/x-amz-json-1.1",
    "x-amz-target": "Kinesis_20131202.ListStreams",
    "x-amz-date": "20261116T000000Z",
    "authorization": AUTHORIZATION,
}
ACCESS_DENIED = b"<Message>Unable to determine service/operation name to be authorized</Message>"
ADMIN = {"x-anabranch": "1"}


@pytest.fixture
def ask(plain_kinesis):
    connection = http.client.HTTPConnection(plain_kinesis.endpoint_url.removeprefix("http://"), timeout=PATIENCE)

    def call(method, path="/", body=None, headers=None):
        connection.request(method, path, body, headers or {})
        response = connection.getresponse()
        return response.status, response.headers, response.read()

    yield call
    connection.close()


def without(*names, **changed):
    headers = {name: value for name, value in SIGNED.items() if name not in names}
    return headers | {name.replace("_", "-"): value for name, value in changed.items()}


def test_a_request_that_is_not_a_call_is_rejected_in_xml(ask):
    status, headers, body = ask("GET")
    assert (status, ACCESS_DENIED in body) == (403, True)
    assert headers["x-amzn-RequestId"]
    assert headers["x-amz-id-2"]
    assert ask("PUT", body=b"{}")[0] == 403
    status, _, body = ask("POST", body=b"{}", headers=without("x-amz-target", content_type="text/plain"))
    assert (status, ACCESS_DENIED in body) == (403, True)
    status, _, body = ask("POST", body=b"{}", headers=without(content_type="text/plain"))
    assert (status, body) == (404, b"<UnknownOperationException/>\n")


@pytest.mark.parametrize(
    "headers, body, code",
    [
        (SIGNED, b"", "SerializationException"),
        (SIGNED, b"{", "SerializationException"),
        (SIGNED, b"[]", "SerializationException"),
        (SIGNED, b"\xff", "SerializationException"),
        (SIGNED, b"[" * 100_000, "SerializationException"),
        (without(x_amz_target="Kinesis_20131202.Explode"), b"{}", "UnknownOperationException"),
        (without(x_amz_target="DynamoDB_20120810.ListTables"), b"{}", "UnknownOperationException"),
        (without("x-amz-target"), b"{}", "UnknownOperationException"),
        (without("authorization"), b"{}", "MissingAuthenticationTokenException"),
        (without("x-amz-date"), b"{}", "IncompleteSignatureException"),
        (without(authorization="AWS4-HMAC-SHA256 nothing"), b"{}", "IncompleteSignatureException"),
    ],
)
def test_a_bad_call_is_rejected_in_json(ask, headers, body, code):
    status, answered, raw = ask("POST", body=body, headers=headers)
    assert (status, json.loads(raw)["__type"]) == (400, code)
    assert answered["content-type"] == "application/x-amz-json-1.1"


def test_browsers_may_call_from_any_origin(ask):
    asked = {
        "origin": "http://localhost:3000",
        "access-control-request-method": "POST",
        "access-control-request-headers": "x-amz-target",
    }
    status, headers, body = ask("OPTIONS", headers=asked)
    assert (status, body) == (200, b"")
    assert headers["access-control-allow-origin"] == "*"
    assert headers["access-control-allow-headers"] == "x-amz-target"
    assert headers["access-control-allow-methods"] == "POST"
    assert headers["access-control-max-age"] == "172800"
    assert "x-amz-id-2" not in headers
    status, headers, _ = ask("POST", body=b"{}", headers=without(origin="http://localhost:3000"))
    assert (status, headers["access-control-allow-origin"]) == (200, "*")
    assert "x-amzn-RequestId" in headers["access-control-expose-headers"]


def test_health_needs_no_signature(ask, plain_kinesis):
    status, _, body = ask("GET", "/health")
    assert status == 200
    assert json.loads(body)["status"] == "ok"
    assert json.loads(body)["endpoint"] == plain_kinesis.endpoint_url
    assert ask("HEAD", "/health")[0] == 200
    assert ask("POST", "/health", b"x")[0] == 405


def test_faults_are_scripted_listed_and_removed_over_http(ask, plain_kinesis):
    rule = {"operation": "ListStreams", "fault": "error", "code": "LimitExceededException", "status": 400, "times": 1}
    status, _, body = ask("POST", "/_local/faults", json.dumps([rule, {"fault": "delay", "seconds": 0}]), ADMIN)
    assert status == 200
    assert len(json.loads(body)["faults"]) == 2
    assert json.loads(ask("POST", body=b"{}", headers=SIGNED)[2])["__type"] == "LimitExceededException"
    assert ask("POST", body=b"{}", headers=SIGNED)[0] == 200
    listed = json.loads(ask("GET", "/_local/faults", headers=ADMIN)[2])["faults"]
    assert (listed[0]["struck"], listed[1]["struck"]) == (1, 1 + 1)
    assert json.loads(ask("DELETE", "/_local/faults", headers=ADMIN)[2]) == {"faults": []}
    assert plain_kinesis.faults.is_empty


@pytest.mark.parametrize(
    "method, path, body, status, said",
    [
        ("POST", "/_local/faults", b'{"fault": "explode"}', 400, "Invalid enum value"),
        ("POST", "/_local/faults", b'{"fault": "drop", "tmes": 1}', 400, "unknown field `tmes`"),
        ("POST", "/_local/faults", b"nonsense", 400, "not a fault rule"),
        ("PUT", "/_local/faults", b"{}", 405, "POST to add"),
        ("GET", "/_local/reset", None, 405, "use POST"),
        ("GET", "/_local/nothing", None, 404, "/_local/faults and /_local/reset"),
    ],
)
def test_the_admin_endpoint_explains_what_it_rejects(ask, method, path, body, status, said):
    answered, _, raw = ask(method, path, body, ADMIN)
    assert answered == status
    assert said in json.loads(raw)["error"]


def test_a_reset_leaves_no_streams_and_no_faults(ask, plain_kinesis):
    plain_kinesis.boto3.create_stream(StreamName="orders", ShardCount=1)
    plain_kinesis.faults.on("PutRecord").drop()
    assert ask("POST", "/_local/reset", headers=ADMIN)[0] == 200
    assert plain_kinesis.boto3.list_streams()["StreamNames"] == []
    assert plain_kinesis.faults.is_empty


@pytest.mark.parametrize(
    "headers",
    [
        {},  # a form, or fetch() with mode "no-cors"
        {"origin": "https://evil.example", "content-type": "text/plain"},
        {"x-anabranch": "1", "host": "evil.example"},  # a domain that points to this machine
        {"x-anabranch": "1", "host": "127.0.0.1.evil.example:4567"},
        {"x-anabranch": "1", "host": "localhost.evil.example"},
    ],
)
@pytest.mark.parametrize(
    "method, path", [("POST", "/_local/reset"), ("POST", "/_local/faults"), ("GET", "/_local/faults")]
)
def test_a_web_page_cannot_use_the_admin_endpoint(ask, plain_kinesis, method, path, headers):
    plain_kinesis.boto3.create_stream(StreamName="precious", ShardCount=1)
    status, answered, body = ask(method, path, b'{"fault": "drop"}' if method == "POST" else None, headers)
    assert status == 403
    assert json.loads(body)["error"]
    assert "access-control-allow-origin" not in answered
    assert plain_kinesis.boto3.list_streams()["StreamNames"] == ["precious"]
    assert plain_kinesis.faults.is_empty


def test_the_admin_endpoint_grants_no_other_origin_its_header(ask):
    asked = {"origin": "https://evil.example", "access-control-request-headers": "x-anabranch"}
    status, headers, _ = ask("OPTIONS", "/_local/reset", headers=asked)
    assert status == 403
    assert not [name for name in headers if name.lower().startswith("access-control")]


@pytest.mark.parametrize(
    "host", ["127.0.0.1:4567", "[::1]:4567", "localhost", "kinesis:4567", "my.localhost:1", "10.0.0.7"]
)
def test_hosts_of_this_machine_and_its_network_are_served(ask, host):
    assert ask("GET", "/_local/faults", headers={**ADMIN, "host": host})[0] == 200


def test_the_name_that_the_server_was_started_with_is_served():
    assert is_local_host("kinesis.test.example:4567", "kinesis.test.example")
    assert not is_local_host("kinesis.test.example:4567", "127.0.0.1")
    assert not is_local_host("", "127.0.0.1")


def test_any_complete_signature_is_accepted():
    check_signature_form({"authorization": AUTHORIZATION, "x-amz-date": "20261116T000000Z"})
    check_signature_form({"authorization": AUTHORIZATION, "date": "today"})


@pytest.mark.parametrize(
    "headers, code, message",
    [
        ({}, "MissingAuthenticationTokenException", "Missing Authentication Token"),
        ({"authorization": AUTHORIZATION}, "IncompleteSignatureException", "either a 'X-Amz-Date' or a 'Date' header"),
        ({"authorization": "AWS4 x", "date": "d"}, "IncompleteSignatureException", "requires 'Credential' parameter"),
    ],
)
def test_an_incomplete_signature_is_rejected_with_awss_message(headers, code, message):
    with pytest.raises(LocalError, match=message) as refused:
        check_signature_form(headers)
    assert refused.value.code == code
