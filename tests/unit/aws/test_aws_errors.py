import pickle

import botocore.session
import pytest

from anabranch import errors
from anabranch._aws.errors import service_error
from anabranch._wire.bodies import AwsError


def refused(code, *, status=400, message="no", **more):
    return service_error("GetRecords", AwsError(code, message), status=status, **more)


@pytest.mark.parametrize(
    "code, kind",
    [
        ("ProvisionedThroughputExceededException", errors.ThrottledError),
        ("KMSThrottlingException", errors.ThrottledError),
        ("LimitExceededException", errors.ThrottledError),
        ("InternalFailure", errors.UnavailableError),
        ("ExpiredIteratorException", errors.ExpiredIteratorError),
        ("ExpiredNextTokenException", errors.ExpiredIteratorError),
        ("ExpiredTokenException", errors.ExpiredTokenError),
        ("RequestExpired", errors.ExpiredTokenError),
        ("ResourceInUseException", errors.ResourceInUseError),
        ("AccessDeniedException", errors.AccessDeniedError),
        ("UnrecognizedClientException", errors.AccessDeniedError),
        ("KMSAccessDeniedException", errors.AccessDeniedError),
        ("ResourceNotFoundException", errors.StreamNotFoundError),
        ("InvalidArgumentException", errors.InvalidRequestError),
        ("ValidationException", errors.InvalidRequestError),
    ],
)
def test_a_code_becomes_its_error(code, kind):
    error = refused(code, request_id="id-1", region="eu-west-1")
    assert type(error) is kind
    assert (error.code, error.operation, error.request_id) == (code, "GetRecords", "id-1")
    assert "id-1" in str(error)


def test_every_error_that_the_service_names_for_a_data_call_is_in_the_table():
    model = botocore.session.Session().get_service_model("kinesis")
    named = {
        shape.error_code
        for operation in ("GetRecords", "PutRecords", "ListShards", "SubscribeToShard", "DescribeStreamSummary")
        for shape in model.operation_model(operation).error_shapes
    }
    unknown = {code for code in named if type(refused(code, status=418)) is errors.InvalidRequestError}
    assert unknown <= {"DryRunOperationException", "InvalidArgumentException", "ValidationException"}


@pytest.mark.parametrize(
    "status, kind",
    [
        (500, errors.UnavailableError),
        (503, errors.UnavailableError),
        (408, errors.UnavailableError),
        (429, errors.ThrottledError),
        (403, errors.AccessDeniedError),
        (413, errors.InvalidRequestError),
    ],
)
def test_an_unknown_code_is_judged_by_its_status(status, kind):
    assert type(refused("NeverHeardOf", status=status)) is kind
    assert refused(None, status=status).code == f"HTTP {status}"


@pytest.mark.parametrize(
    "words", ["Signature expired: 20260101T000000Z is now earlier than", "Signature not yet current"]
)
def test_an_expired_signature_is_distinguished_from_a_wrong_one(words):
    assert type(refused("InvalidSignatureException", message=words)) is errors.ExpiredTokenError
    assert type(refused("InvalidSignatureException")) is errors.AccessDeniedError


def test_common_first_errors_come_with_advice():
    missing = str(refused("ResourceNotFoundException", message="Stream orders not found.", region="eu-north-1"))
    assert "not found (searched in eu-north-1: check the name, the region and the account)" in missing
    assert "aws sso login" in str(refused("ExpiredTokenException"))
    assert "the secret key belongs" in str(refused("SignatureDoesNotMatch", message=""))


def test_an_error_survives_a_process_boundary():
    error = pickle.loads(pickle.dumps(refused("ThrottlingException", request_id="r", retry_after_seconds=2.5)))
    assert (type(error), error.request_id, error.retry_after_seconds) == (errors.ThrottledError, "r", 2.5)
