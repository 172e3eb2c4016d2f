"""The tree of errors: as drawn, picklable, and with a message by default."""

import ast
import inspect
import pickle

import pytest

from anabranch import errors

CLASSES = [kind for _, kind in inspect.getmembers(errors, inspect.isclass) if kind.__module__ == errors.__name__]
SERVICE_ERRORS = [kind for kind in CLASSES if issubclass(kind, errors.ServiceError)]
OTHERS = [kind for kind in CLASSES if kind not in SERVICE_ERRORS]


def drawn():
    """(depth, name, description) of every line of the drawing."""
    lines = ast.get_docstring(ast.parse(inspect.getsource(errors))).splitlines()
    tree = [line for line in lines if line.startswith("    ")]
    for line in tree:
        text = line[4:]
        label = text.lstrip("│├└─ ")
        name, _, description = label.partition(" ")
        yield (len(text) - len(label)) // 4, name, description.strip()


def lineage(kind):
    return [base.__name__ for base in reversed(kind.__mro__) if issubclass(base, errors.AnabranchError)]


def make(kind, message="it broke"):
    if kind in SERVICE_ERRORS:
        return kind(message, operation="GetRecords", code="Code", status=503, request_id="r-1", retry_after_seconds=0.5)
    return kind(message)


def test_the_drawing_is_the_tree():
    path, found = [], []
    for depth, name, _ in drawn():
        path[depth:] = [name]
        found.append(list(path))
    assert sorted(found) == sorted(lineage(kind) for kind in CLASSES)


def test_the_drawing_says_which_errors_may_be_tried_again():
    said = {name for _, name, description in drawn() if description.startswith("retryable")}
    assert said == {kind.__name__ for kind in CLASSES if kind.retryable}


@pytest.mark.parametrize("kind", CLASSES)
def test_an_error_survives_pickling(kind):
    error = make(kind)
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is kind
    assert str(copy) == str(error)
    assert vars(copy) == vars(error)


def test_what_an_error_carries_survives_pickling():
    assert pickle.loads(pickle.dumps(errors.ConfigurationError(["a", "b"]))).violations == ("a", "b")
    assert pickle.loads(pickle.dumps(errors.TransportError("x", maybe_sent=False))).maybe_sent is False
    assert pickle.loads(pickle.dumps(errors.DeliveryFailed("x", results=[1, 2]))).results == (1, 2)


@pytest.mark.parametrize("kind", [kind for kind in OTHERS if kind is not errors.ConfigurationError])
def test_the_docstring_is_the_default_message(kind):
    assert str(kind()) == kind.__doc__.strip()
    assert str(kind("said better")) == "said better"


def test_a_configuration_error_names_every_violation():
    error = errors.ConfigurationError(["a is 1", "b is 2"])
    assert str(error) == "a is 1; b is 2"
    assert errors.ConfigurationError("a is 1").violations == ("a is 1",)
    assert isinstance(error, ValueError)


def test_a_service_error_names_call_code_message_and_request():
    error = make(errors.ThrottledError, "slow down")
    assert str(error) == "GetRecords: Code: slow down (request id r-1)"
    assert (error.message, error.status, error.retry_after_seconds) == ("slow down", 503, 0.5)
    bare = errors.ServiceError("", operation="GetRecords", code="Code")
    assert str(bare) == "GetRecords: Code"


def test_the_first_undelivered_result_stands_for_all():
    assert errors.DeliveryFailed(results=["first", "second"]).result == "first"
    assert errors.DeliveryFailed().result is None
