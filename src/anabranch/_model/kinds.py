"""Checks settings against their declared types and the choices of a `Literal`. Typical mistakes are `"32"` for 32, from
an environment variable, and NaN.

Callers check ranges later, when the values can be compared.
"""

from collections.abc import Collection, Mapping
from datetime import datetime
from math import isfinite
from types import NoneType, UnionType
from typing import Any, Final, Literal, Union, get_args, get_origin, get_type_hints

from anabranch.errors import ConfigurationError


def type_violations(given: Mapping[str, object], kinds: Mapping[str, Any]) -> list[str]:
    """One text for each value of a wrong type."""
    return [
        f"{name} is {given[name]!r}; it must be {_one_of(kind)}"
        for name, kind in kinds.items()
        if not any(_fits(given[name], choice) for choice in _choices(kind))
    ]


def check_types(given: Mapping[str, object], kinds: Mapping[str, Any]) -> list[str]:
    """Raises ConfigurationError if a value has the wrong type. Otherwise returns the wrong choices, which the caller
    reports together with values out of range.
    """
    violations = type_violations(given, kinds)
    if any(
        not any(_fits(given[name], str if get_origin(choice) is Literal else choice) for choice in _choices(kind))
        for name, kind in kinds.items()
    ):
        raise ConfigurationError(violations)
    return violations


def check_field_types(settings: object) -> list[str]:
    kinds = get_type_hints(type(settings))
    return check_types({name: getattr(settings, name) for name in kinds}, kinds)


def field_type_violations(settings: object, *, but: Collection[str] = ()) -> list[str]:
    """Like `type_violations`, for an object whose class declares its fields, but not for all of them."""
    kinds = {name: kind for name, kind in get_type_hints(type(settings)).items() if name not in but}
    return type_violations({name: getattr(settings, name) for name in kinds}, kinds)


def check_seconds(name: str, given: object) -> None:
    """Raises TypeError unless it is a number of seconds or None."""
    if given is not None and not isinstance(given, int | float):
        raise TypeError(f"{name} is {given!r}; it must be a number of seconds, or None")


def _choices(kind: Any) -> tuple[Any, ...]:
    return get_args(kind) if get_origin(kind) in {Union, UnionType} else (kind,)


def _fits(value: object, kind: Any) -> bool:
    if kind is float:
        return isinstance(value, int | float) and not isinstance(value, bool) and isfinite(value)
    if kind is int:
        return isinstance(value, int) and not isinstance(value, bool)
    if get_origin(kind) is Literal:
        return value in get_args(kind)
    return kind is Any or isinstance(value, kind)


def _one_of(kind: Any) -> str:
    *others, last = [text for choice in _choices(kind) for text in _words(choice)]
    return f"{', '.join(others)} or {last}" if others else last


def _words(kind: Any) -> list[str]:
    if get_origin(kind) is Literal:
        return [repr(value) for value in get_args(kind)]
    return _WORDS.get(kind) or [f"of type {kind.__name__}"]


_WORDS: Final = {
    bool: ["True", "False"],
    float: ["a number"],
    int: ["a whole number"],
    str: ["text"],
    NoneType: ["None"],
    datetime: ["a datetime"],
}
