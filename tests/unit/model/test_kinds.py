"""Kinds of values: text from environment variables and files is distinguished from the expected types."""

from dataclasses import dataclass
from typing import Any, Literal

import pytest

from anabranch._model.kinds import field_type_violations, type_violations


class Thing:
    pass


@pytest.mark.parametrize(
    "value, kind",
    [
        (1, float), (1.5, float), (1, int), ("a", str), (None, int | None), (2, int | None), ("a", Literal["a", "b"]),
        (Thing(), Thing), (7, Thing | int), (object(), Any), ([], Any | None),
    ],
)  # fmt: skip
def test_a_value_of_its_kind_is_right(value, kind):
    assert type_violations({"size": value}, {"size": kind}) == []


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
    assert type_violations({"size": value}, {"size": kind}) == [words]


def test_the_fields_of_settings_are_judged_by_what_their_class_declares():
    @dataclass(frozen=True, slots=True)
    class Settings:
        count: int
        share: float = 1.0

    assert field_type_violations(Settings(5)) == []
    assert field_type_violations(Settings("5", None)) == [
        "count is '5'; it must be a whole number",
        "share is None; it must be a number",
    ]
