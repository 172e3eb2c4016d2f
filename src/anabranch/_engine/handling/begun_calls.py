"""Calls that were begun in the middle of a step, and are awaited only if they wait.

Awaiting a call runs it up to where it waits, and then the whole task waits with it: there is no time to do anything in
between. So a call is begun by hand (`next(call.__await__(), FINISHED)`), and what it waits for is held until the task
awaits the rest of it, in the same step of the loop.
"""

import types
from collections.abc import Generator
from typing import Any, Final

__all__ = ["FINISHED", "failed", "going_on"]

FINISHED: Final = object()
"""In place of what a call waits for: it has ended."""


@types.coroutine
def going_on(steps: Generator[Any, Any, Any], waits_for: Any) -> Generator[Any, Any, Any]:
    """The rest of a call that waits for something."""
    while True:
        try:
            yield waits_for
        except GeneratorExit:
            steps.close()  # which may have been done already, where nobody holds the task any more
            raise
        except BaseException as error:  # noqa: BLE001 -- whatever it is, it is meant for the call
            try:
                waits_for = steps.throw(error)  # it may take no notice, and wait again
            except StopIteration as ended:
                return ended.value
        else:
            return (yield from steps)


async def failed(error: BaseException) -> None:
    """The rest of a call that has raised an error."""
    raise error
