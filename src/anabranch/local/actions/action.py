"""What an operation is: the shape of its request, and a function of account, request and time that gives its answer."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeAlias

from anabranch.local.shapes import StructureShape
from anabranch.local.state.account import Account

__all__ = ["Action", "Answer", "Request"]

Request: TypeAlias = Mapping[str, Any]
Answer: TypeAlias = dict[str, Any]


class Action(NamedTuple):
    request: StructureShape
    perform: Callable[[Account, Request, int], Answer]
