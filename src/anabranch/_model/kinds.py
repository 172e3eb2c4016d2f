"""Checks that settings have their declared types. Wrong ones come from environment variables and files: `"32"` for 32,
or NaN.

Only types are checked here, so that later checks can compare the values.
"""

from collections.abc import Collection, Mapping
from math import isfinite
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints


def type_violations(given: Mapping[str, object], kinds: Mapping[str, Any]) -> list[str]:
    """One text for each value of a wrong type."""
    return [
        f"{name} is {given[name]!r}; it must be {' or '.join(map(_words, _choices(kind)))}"
        for name, kind in kinds.items()
        if not any(_fits(given[name], choice) for choice in _choices(kind))
    ]


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
        return isinstance(value, str)
    return kind is Any or isinstance(value, kind)


def _words(kind: Any) -> str:
    known = {float: "a number", int: "a whole number", str: "text", NoneType: "None"}
    if get_origin(kind) is Literal:
        return "text"
    return known.get(kind) or f"of type {kind.__name__}"
