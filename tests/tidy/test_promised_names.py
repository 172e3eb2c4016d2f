"""Every public error is raised somewhere, and every event is emitted somewhere."""

import ast
from pathlib import Path

import pytest

import anabranch
from anabranch import errors, events, reasons

PACKAGE = Path(anabranch.__file__).parent


def names_used():
    """Plain names in the source outside of where errors and events are defined: `msgspec.DecodeError` is not ours."""
    places = [path for path in PACKAGE.rglob("*.py") if path.name != "errors.py" or path.parent != PACKAGE]
    trees = [ast.parse(path.read_text()) for path in places if path.parent.name != "events"]
    return {node.id for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Name)}


@pytest.mark.parametrize("module", [errors, events, reasons])
def test_what_is_promised_happens_somewhere(module):
    used = names_used()
    assert [name for name in module.__all__ if name not in used] == []
