"""Every public error is raised somewhere, and every event is emitted somewhere."""

import ast
import inspect
from pathlib import Path

import pytest

import anabranch
from anabranch import errors, events, reasons

PACKAGE = Path(anabranch.__file__).parent


def names_used():
    """Plain names in the source (`msgspec.DecodeError` is not ours), without the tools for tests: they look at events
    and emit none. A class that others inherit is used.
    """
    places = [path for path in PACKAGE.rglob("*.py") if path.relative_to(PACKAGE).parts[0] != "testing"]
    trees = [ast.parse(path.read_text()) for path in places]
    return {node.id for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Name)}


@pytest.mark.parametrize("module", [errors, events, reasons])
def test_what_is_promised_happens_somewhere(module):
    promised = [
        name for name, kind in inspect.getmembers(module, inspect.isclass) if kind.__module__ == module.__name__
    ]
    used = names_used()
    assert [name for name in promised if name not in used] == []
