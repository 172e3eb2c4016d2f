import pytest

from anabranch.local.errors import LocalError
from anabranch.local.http import check_signature_form

SIGNED = "AWS4-HMAC-SHA256 Credential=a/20261116/us-east-1/kinesis/aws4_request, SignedHeaders=host, Signature=0f"
QUERY = "X-Amz-Algorithm=A&X-Amz-Credential=c&X-Amz-Signature=s&X-Amz-SignedHeaders=h&X-Amz-Date=d"


def test_a_signature_of_the_right_form_passes_whatever_it_says():
    check_signature_form({"authorization": SIGNED, "x-amz-date": "20261116T000000Z"}, "")
    check_signature_form({"authorization": SIGNED, "date": "today"}, "")
    check_signature_form({}, QUERY)


@pytest.mark.parametrize(
    "headers, query, code, message",
    [
        ({}, "", "MissingAuthenticationTokenException", "Missing Authentication Token"),
        ({"authorization": SIGNED}, QUERY, "InvalidSignatureException", "Found both"),
        ({"authorization": SIGNED}, "", "IncompleteSignatureException", "either a 'X-Amz-Date' or a 'Date' header"),
        (
            {"authorization": "AWS4 x", "date": "d"},
            "",
            "IncompleteSignatureException",
            "requires 'Credential' parameter",
        ),
        ({}, "X-Amz-Algorithm=A", "IncompleteSignatureException", "must include 'X-Amz-Signature'"),
    ],
)
def test_what_is_missing_is_named_in_awss_words(headers, query, code, message):
    with pytest.raises(LocalError, match=message) as refused:
        check_signature_form(headers, query)
    assert refused.value.code == code
