"""Checks settings against their declared types and the choices of a `Literal`. Typical mistakes are `"32"` for 32, from
an environment variable, and NaN.

Callers check ranges later, when the values can be compared.
"""

import inspect
from collections.abc import Collection, Mapping, Sequence
from dataclasses import is_dataclass
from datetime import datetime
from math import isfinite
from types import NoneType, UnionType
from typing import Any, Final, Literal, Union, get_args, get_origin, get_type_hints

from anabranch.errors import ConfigurationError


def refuse(violations: Sequence[str]) -> None:
    """Raises ConfigurationError if there are any."""
    if violations:
        raise ConfigurationError(violations)


def check_types(given: Mapping[str, object], kinds: Mapping[str, Any]) -> list[str]:
    """Raises ConfigurationError for a wrong type. Returns wrong choices, to report them with values out of range."""
    violations: list[str] = []
    has_wrong_types = False
    for name, kind in kinds.items():
        value, choices = given[name], _choices(kind)
        if not any(_fits(value, choice) for choice in choices):
            violations.append(f"{name} is {value!r}; it must be {_one_of(kind)}{_place(value, choices)}")
            has_choice = any(get_origin(choice) is Literal for choice in choices)
            has_wrong_types = has_wrong_types or not (has_choice and isinstance(value, str))
    if has_wrong_types:
        refuse(violations)
    return violations


def check_field_types(settings: object, *, but: Collection[str] = ()) -> list[str]:
    """Like `check_types`, for the fields that the object's class declares, except those named in `but`."""
    kinds = {name: kind for name, kind in get_type_hints(type(settings)).items() if name not in but}
    return check_types({name: getattr(settings, name) for name in kinds}, kinds)


def check_arguments(function: object, given: Mapping[str, object], *, but: Collection[str] = ()) -> list[str]:
    """Like `check_types`, for the annotated parameters of a function, without those named in `but`."""
    kinds = {name: kind for name, kind in get_type_hints(function).items() if name not in {*but, "return"}}
    return check_types(given, kinds)


def check_hook(name: str, hook: object, argument: str) -> None:
    """Raises ConfigurationError unless the hook is None or a plain function. Nothing awaits an async one."""
    if hook is not None and (not callable(hook) or is_async(hook)):
        raise ConfigurationError(
            f"{name}={hook!r}: expected a plain function that takes {argument}, not an async function"
        )


def is_async(function: object) -> bool:
    """Whether it is an async function, or an object that is called like one."""
    functions = (function, getattr(function, "__call__", None))  # noqa: B004 -- the method of a callable object
    return any(map(inspect.iscoroutinefunction, functions))


def check_seconds(name: str, given: object) -> None:
    """Raises TypeError unless it is a finite number of seconds or None."""
    if given is not None and not (isinstance(given, int | float) and isfinite(given)):
        raise TypeError(f"{name} is {given!r}; it must be a finite number of seconds, or None")


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
    listed = f"{', '.join(others)} or {last}" if others else last
    return listed.replace(f", {_OF_TYPE}", ", ").replace(f" or {_OF_TYPE}", " or ")


def _place(value: object, choices: Sequence[Any]) -> str:
    """The right way to pass it, if the value is a class instead of an object, or belongs to a field of one."""
    if isinstance(value, type):
        return f"; write {value.__name__}()" if value in choices else ""
    if is_dataclass(value):
        for choice in choices:
            fields = get_type_hints(choice) if is_dataclass(choice) else {}
            for name, kind in fields.items():
                if type(value) in _choices(kind):
                    return f"; write {choice.__name__}({name}={type(value).__name__}(...))"
    return ""


def _words(kind: Any) -> list[str]:
    if get_origin(kind) is Literal:
        return [repr(value) for value in get_args(kind)]
    return _WORDS.get(kind) or [f"{_OF_TYPE}{kind.__name__}"]


_OF_TYPE: Final = "of type "
_WORDS: Final = {
    bool: ["True", "False"],
    float: ["a number"],
    int: ["a whole number"],
    str: ["text"],
    NoneType: ["None"],
    datetime: ["a datetime"],
}
