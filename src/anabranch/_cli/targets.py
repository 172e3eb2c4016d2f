"""Finds the consumer that `module:name` names, or says what is there instead.

The working directory is on the path, as for `python -m`. An error inside the module is the user's own, and is shown
with its traceback.
"""

import importlib
import os
import sys
import traceback
from types import ModuleType
from typing import TYPE_CHECKING, Any

from anabranch._cli.output import CommandFailed
from anabranch.errors import ConfigurationError

if TYPE_CHECKING:
    from anabranch.consumer import Consumer

__all__ = ["find_consumer"]


def find_consumer(target: str) -> "Consumer[Any]":
    from anabranch.consumer import Consumer

    module_name, colon, path = target.partition(":")
    if not (colon and module_name and path):
        raise ConfigurationError(f"{target!r} names no consumer: write MODULE:NAME, such as app:consumer")
    if module_name.endswith(".py") or os.sep in module_name:
        name = module_name.removesuffix(".py").strip("./").replace(os.sep, ".")
        raise ConfigurationError(f"{module_name!r} is a file: name it as a module, {name}:{path}")
    module = _import(module_name)
    found: Any = module
    for attribute in path.split("."):
        if not hasattr(found, attribute):
            raise ConfigurationError(f"module {module_name!r} has no {path!r}{_consumers_in(module, Consumer)}")
        found = getattr(found, attribute)
    if not isinstance(found, Consumer):
        kind = "class" if isinstance(found, type) else "function" if callable(found) else type(found).__name__
        raise ConfigurationError(f"{target} is a {kind}, and no Consumer{_consumers_in(module, Consumer)}")
    if not found.has_handler:
        raise ConfigurationError(
            f"{target} has no handler: mark a function by @{path}.handler, or by @{path}.batch_handler()"
        )
    return found


def _import(name: str) -> ModuleType:
    here = os.getcwd()  # noqa: PTH109 -- a path for sys.path
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            _show_traceback(error)
            raise CommandFailed(f"module {name!r} cannot be imported: {error}") from error
        raise ConfigurationError(
            f"there is no module {error.name!r}: it is looked for in {here} and on Python's path"
        ) from None
    except ConfigurationError as error:
        _show_traceback(error)
        raise
    except Exception as error:
        _show_traceback(error)
        raise CommandFailed(f"module {name!r} cannot be imported: {type(error).__name__}: {error}") from error


def _show_traceback(error: Exception) -> None:
    """From the user's own module on: the import machinery above it is of no interest."""
    trace = error.__traceback__
    while trace is not None and (
        "importlib" in trace.tb_frame.f_code.co_filename or trace.tb_frame.f_code is _import.__code__
    ):
        trace = trace.tb_next
    traceback.print_exception(type(error), error, trace)


def _consumers_in(module: ModuleType, consumer_type: type) -> str:
    names = sorted(name for name, value in vars(module).items() if isinstance(value, consumer_type))
    return f"; consumers there: {', '.join(names)}" if names else "; there is no consumer in that module"
