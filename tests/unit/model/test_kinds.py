"""Kinds of values: text from environment variables and files is distinguished from the expected types."""

from dataclasses import dataclass
from typing import Any, Literal

import pytest

from anabranch import Retry, Skip
from anabranch._model.kinds import check_field_types, check_types
from anabranch.errors import ConfigurationError


class Thing:
    pass


def violations_of(check, *arguments):
    try:
        return check(*arguments)
    except ConfigurationError as error:
        return list(error.violations)


@pytest.mark.parametrize(
    "value, kind",
    [
        (1, float), (1.5, float), (1, int), ("a", str), (None, int | None), (2, int | None), ("a", Literal["a", "b"]),
        (Thing(), Thing), (7, Thing | int), (object(), Any), ([], Any | None),
    ],
)  # fmt: skip
def test_a_value_of_its_kind_is_right(value, kind):
    assert violations_of(check_types, {"size": value}, {"size": kind}) == []


@pytest.mark.parametrize(
    "value, kind, words",
    [
        ("1", float, "size is '1'; it must be a number"),
        (True, float, "size is True; it must be a number"),
        (float("nan"), float, "size is nan; it must be a number"),
        (float("inf"), float | None, "size is inf; it must be a number or None"),
        (1.5, int, "size is 1.5; it must be a whole number"),
        (True, int, "size is True; it must be a whole number"),
        (5, str | None, "size is 5; it must be text or None"),
        ([], Literal["a", "b"], "size is []; it must be 'a' or 'b'"),
        ("c", bool | Literal["a"], "size is 'c'; it must be True, False or 'a'"),
        ("x", Thing | int, "size is 'x'; it must be of type Thing or a whole number"),
    ],
)
def test_a_value_of_another_kind_is_named_with_what_would_be_right(value, kind, words):
    assert violations_of(check_types, {"size": value}, {"size": kind}) == [words]


def test_the_fields_of_settings_are_judged_by_what_their_class_declares():
    @dataclass(frozen=True, slots=True)
    class Settings:
        count: int
        share: float = 1.0

    assert violations_of(check_field_types, Settings(5)) == []
    assert violations_of(check_field_types, Settings("5", None)) == [
        "count is '5'; it must be a whole number",
        "share is None; it must be a number",
    ]


@dataclass(frozen=True)
class Part:
    size: int


@dataclass(frozen=True)
class Whole:
    count: int
    part: Part


def test_settings_that_belong_into_other_settings_are_shown_their_place():
    for kind in (Whole, Whole | None):
        (violation,) = violations_of(check_types, {"settings": Part(5)}, {"settings": kind})
        assert violation.endswith("; write Whole(part=Part(...))")
    (violation,) = violations_of(check_types, {"settings": Skip()}, {"settings": Retry | None})
    assert violation == "settings is Skip(); it must be of type Retry or None; write Retry(then=Skip(...))"
    (violation,) = violations_of(check_types, {"settings": 5}, {"settings": Whole})
    assert violation == "settings is 5; it must be of type Whole"


def test_a_wrong_type_is_raised_at_once_and_a_wrong_choice_is_returned():
    kinds = {"read": Literal["polling", "fanout"], "count": int}
    assert check_types({"read": "pull", "count": 1}, kinds) == ["read is 'pull'; it must be 'polling' or 'fanout'"]
    with pytest.raises(ConfigurationError) as caught:
        check_types({"read": "pull", "count": "1"}, kinds)
    assert len(caught.value.violations) == 2
