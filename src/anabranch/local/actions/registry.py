"""The operations of the API by name. The modules beside this one register them.

An operation is a function of account, request and time. PutRecords and SubscribeToShard do not return a plain answer:
they are called by name and not registered here.
"""

from collections.abc import Callable, Mapping
from typing import Any, Final, TypeAlias

from anabranch.local.shapes import REQUESTS
from anabranch.local.state.account import Account

Request: TypeAlias = Mapping[str, Any]
Answer: TypeAlias = dict[str, Any]
Perform: TypeAlias = Callable[[Account, Request, int], Answer]

ACTIONS: Final[dict[str, Perform]] = {}


def action(operation: str) -> Callable[[Perform], Perform]:
    """Registers the decorated function as an operation."""
    assert operation in REQUESTS, f"{operation} has no request shape"
    assert operation not in ACTIONS, f"{operation} is registered twice"

    def register(perform: Perform) -> Perform:
        ACTIONS[operation] = perform
        return perform

    return register
