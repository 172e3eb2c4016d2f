"""The operations of the API by name. The modules beside this one register them; Channels are not supported.

An operation is a function of account, request and time. PutRecords and SubscribeToShard do not return a plain answer:
they only declare the shape of their request and are called by name.
"""

from collections.abc import Callable, Mapping
from typing import Any, Final, TypeAlias

from anabranch.local.shapes import Shape, StructureShape
from anabranch.local.state.account import Account

Request: TypeAlias = Mapping[str, Any]
Answer: TypeAlias = dict[str, Any]
Perform: TypeAlias = Callable[[Account, Request, int], Answer]

REQUESTS: Final[dict[str, StructureShape]] = {}
"""The shape of every operation's request."""
ACTIONS: Final[dict[str, Perform]] = {}
"""Every operation that returns a plain answer."""


def action(
    operation: str, members: dict[str, Shape], *, required: tuple[str, ...] = ()
) -> Callable[[Perform], Perform]:
    """Registers the decorated function as an operation, with the members of its request."""
    declare(operation, members, required=required)

    def register(perform: Perform) -> Perform:
        ACTIONS[operation] = perform
        return perform

    return register


def declare(operation: str, members: dict[str, Shape], *, required: tuple[str, ...] = ()) -> StructureShape:
    assert operation not in REQUESTS, f"{operation} is registered twice"
    REQUESTS[operation] = StructureShape(members, required)
    return REQUESTS[operation]
