"""Does a request keep its constraints? All violations at once, in the service's words.

`2 validation errors detected: Value 'x!' at 'streamName' failed to satisfy constraint: Member must ...; Value
...`. Types have been checked before (`serialization`); a request that comes straight from Python code is trusted
to have them right.
"""

from collections.abc import Iterator, Mapping
from typing import Any, Final

from anabranch.local.errors import LocalError
from anabranch.local.shapes import (
    BlobShape,
    IntegerShape,
    ListShape,
    MapShape,
    Shape,
    StringShape,
    StructureShape,
)

__all__ = ["null_member", "validate"]

_VIOLATIONS_MAX: Final = 10  # a request of 500 bad records is answered with the first few


def validate(shape: StructureShape, request: Mapping[str, Any]) -> None:
    violations: list[str] = []
    for violation in _structure(shape, request, ""):
        violations.append(violation)
        if len(violations) == _VIOLATIONS_MAX:
            break
    if violations:
        raise _refused(violations)


def null_member(path: str) -> LocalError:
    """For a member that is only required by the state of the stream."""
    return _refused([_violation(None, path, "not be null")])


def _refused(violations: list[str]) -> LocalError:
    errors = "error" if len(violations) == 1 else "errors"
    return LocalError("ValidationException", f"{len(violations)} validation {errors} detected: {'; '.join(violations)}")


def _violation(value: Any, path: str, constraint: str) -> str:
    shown = "null" if value is None else f"'{_shown(value)}'"
    return f"Value {shown} at '{path}' failed to satisfy constraint: Member must {constraint}"


def _shown(value: Any) -> str:
    if isinstance(value, bytes):
        return f"java.nio.HeapByteBuffer[pos=0 lim={len(value)} cap={len(value)}]"
    if isinstance(value, list):
        return f"[{', '.join(map(_shown, value))}]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_shown(key)}={_shown(member)}" for key, member in value.items()) + "}"
    return str(value)


def _structure(shape: StructureShape, value: Mapping[str, Any], path: str) -> Iterator[str]:
    for name, member_shape in shape.members.items():
        member_path = f"{path}{name[0].lower()}{name[1:]}"
        member = value.get(name)
        if member is not None:
            yield from _member(member_shape, member, member_path)
        elif name in shape.required:
            yield _violation(None, member_path, "not be null")


def _member(shape: Shape, value: Any, path: str) -> Iterator[str]:
    match shape:
        case StringShape():
            yield from _string(shape, value, path)
        case IntegerShape():
            if shape.value_min is not None and value < shape.value_min:
                yield _violation(value, path, f"have value greater than or equal to {shape.value_min}")
            if shape.value_max is not None and value > shape.value_max:
                yield _violation(value, path, f"have value less than or equal to {shape.value_max}")
        case BlobShape():
            if len(value) > shape.length_max:
                yield _violation(value, path, f"have length less than or equal to {shape.length_max}")
        case ListShape():
            yield from _length(shape.length_min, shape.length_max, value, path)
            for index, item in enumerate(value, 1):
                yield from _member(shape.item, item, f"{path}.{index}.member")
        case MapShape():
            yield from _length(shape.length_min, shape.length_max, value, path)
            for key, member in value.items():
                yield from _string(shape.key, key, f"{path}.key")
                yield from _string(shape.value, member, f"{path}.{key}.member")
        case StructureShape():
            yield from _structure(shape, value, f"{path}.")
        case _:  # booleans and timestamps have no constraints
            return


def _string(shape: StringShape, value: str, path: str) -> Iterator[str]:
    if shape.values is not None and value not in shape.values:
        yield _violation(value, path, f"satisfy enum value set: [{', '.join(shape.values)}]")
    if not shape.matches(value):
        yield _violation(value, path, f"satisfy regular expression pattern: {shape.pattern}")
    yield from _length(shape.length_min, shape.length_max, value, path)


def _length(length_min: int | None, length_max: int | None, value: Any, path: str) -> Iterator[str]:
    if length_min is not None and len(value) < length_min:
        yield _violation(value, path, f"have length greater than or equal to {length_min}")
    if length_max is not None and len(value) > length_max:
        yield _violation(value, path, f"have length less than or equal to {length_max}")
