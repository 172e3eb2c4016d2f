"""How a fleet agrees on one registered consumer per stream, and when its last worker removes it (rule F5).

The stream's row has the consumer as the application knows it; DescribeStreamConsumer returns its present state. One
table derives the next step from both. Every write of the row is conditional on its version, so workers that start
together agree; one that loses a write reads the row again.
"""

import re
from typing import Final, Literal, TypeAlias

from msgspec.structs import replace

from anabranch._model.leases import FanOutConsumer
from anabranch._wire.messages import ConsumerDescription

NAME_CHARACTERS_MAX: Final = 128
_ID_DIGITS: Final = 8
_PREFIX: Final = "anabranch-"
_NOT_ALLOWED: Final = re.compile(r"[^a-zA-Z0-9_.-]")
LOOK_EVERY_MS: Final = 1_000
REMOVING_MS_MAX: Final = 30_000
"""How long a joining worker waits for one that removes the consumer. It may have died."""


def own_name(app: str | None, identity: str) -> str:
    """The name of the application's consumer. It has the application's id: one that is created again gets another."""
    tail = identity[:_ID_DIGITS]
    if app is None:
        return f"{_PREFIX}{tail}"
    room = NAME_CHARACTERS_MAX - len(_PREFIX) - len(tail) - 1
    return f"{_PREFIX}{_NOT_ALLOWED.sub('-', app)[:room]}-{tail}"


def is_own_name(name: str) -> bool:
    """Whether the name has the form of a generated one."""
    return re.fullmatch(rf"{_PREFIX}(.+-)?[0-9a-f]{{{_ID_DIGITS}}}", name) is not None


def is_temporary_name(name: str) -> bool:
    """Whether it was made for one run without an application, which removes it on exit."""
    return re.fullmatch(rf"{_PREFIX}[0-9a-f]{{{_ID_DIGITS}}}", name) is not None


Step: TypeAlias = Literal["look", "look_again", "register", "ready"] | FanOutConsumer
"""`look`: call DescribeStreamConsumer; `look_again`: the same, after a moment; `register`: call RegisterStreamConsumer,
where it is no error if the consumer exists already; `ready`: use the stored consumer; a consumer: store it in the row.
"""
Found: TypeAlias = ConsumerDescription | Literal["missing", "unknown"]


def next_step(name: str, stored: FanOutConsumer | None, found: Found, *, waited_ms: int, is_own: bool) -> Step:
    """`found` is "unknown" before the first check. `is_own`: the name is generated, so no other application uses it.

    | the row says | unknown | missing           | CREATING, DELETING | ACTIVE                           |
    |--------------|---------|-------------------|--------------------|----------------------------------|
    | nothing      | look    | write registering | look again         | write found, or registered (own) |
    | registering  | look    | register          | look again         | write registered                 |
    | registered   | ready   | write registering | look again         | ready, or write the new ARN      |
    | found        | ready   | write registering | look again         | ready, or write the new ARN      |
    | removing     | look again; after 30 s write registering, whatever was found                           |
    """
    if stored is not None and stored.name != name:
        stored = None  # another consumer_name is configured now
    if stored is not None and stored.state == "removing":
        return "look_again" if waited_ms < REMOVING_MS_MAX else replace(stored, state="registering")
    is_settled = stored is not None and stored.state in {"registered", "found"}
    if found == "unknown":
        return "ready" if is_settled else "look"
    if found == "missing":
        is_announced = stored is not None and stored.state == "registering"
        return "register" if is_announced else FanOutConsumer(name=name, state="registering")
    if found.status != "ACTIVE":
        return "look_again"
    if stored is None:
        return FanOutConsumer(name=name, arn=found.arn, state="registered" if is_own else "found")
    active = replace(stored, arn=found.arn, state=stored.state if is_settled else "registered")
    return "ready" if active == stored else active


def may_remove(stored: FanOutConsumer | None, name: str) -> bool:
    """Whether the application registered this consumer, so that its last worker may remove it."""
    return stored is not None and stored.name == name and stored.state == "registered"
