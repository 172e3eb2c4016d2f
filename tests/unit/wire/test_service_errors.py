import pytest

from anabranch._wire.bodies import AwsError, decode_aws_error


@pytest.mark.parametrize(
    "body, error_type, expected",
    [
        (
            b'{"__type":"ResourceNotFoundException","message":"Stream x not found."}',
            None,
            AwsError("ResourceNotFoundException", "Stream x not found."),
        ),
        (
            b'{"__type":"com.amazonaws.kinesis.v20131202#LimitExceededException","message":"m"}',
            "Ignored",
            AwsError("LimitExceededException", "m"),
        ),
        (b'{"__type":"SerializationException","Message":"m"}', None, AwsError("SerializationException", "m")),
        (b'  {"code":"X","message":"m"}', None, AwsError("X", "m")),
        (
            b'{"message":"m"}',
            "ThrottlingException:http://internal.amazon.com/coral/",
            AwsError("ThrottlingException", "m"),
        ),
        (b'{"message":null}', None, AwsError(None)),
        (b'{"__type":5,"message":5}', "A#B", AwsError("B")),
        (b"", None, AwsError(None)),
        (b"", "InternalFailure", AwsError("InternalFailure")),
        (b"{truncated", "X", AwsError("X")),
        (b"plain text", None, AwsError(None)),
        (b"\xff\xfe", None, AwsError(None)),
        (b'["no", "object"]', None, AwsError(None)),
        (
            b"<Error><Code>SignatureDoesNotMatch</Code><Message>a &lt; b</Message></Error>",
            None,
            AwsError("SignatureDoesNotMatch", "a < b"),
        ),
        (b"<AccessDeniedException>\n  <Message>no</Message>\n</AccessDeniedException>", "X", AwsError("X", "no")),
        (
            b"\r\n<html>\r\n<head><title>503 Service Temporarily Unavailable</title></head></html>",
            None,
            AwsError(None, "503 Service Temporarily Unavailable"),
        ),
        (b"<", None, AwsError(None)),
        (b'{"a":' + b"[" * 60_000, None, AwsError(None)),
    ],
)
def test_the_code_and_message_are_found_in_every_form(body: bytes, error_type: str | None, expected: AwsError) -> None:
    assert decode_aws_error(memoryview(body), error_type) == expected


def test_a_long_answer_is_cut() -> None:
    error = decode_aws_error(b'{"__type":"%b","message":"%b"}' % (b"C" * 1000, b"m" * 10_000))
    assert error.code == "C" * 128
    assert error.message == "m" * 2048
    assert decode_aws_error(b'{"message":"%b"}' % (b"m" * (1 << 20)), "X") == AwsError("X")
