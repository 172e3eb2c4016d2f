"""The reference lists every error, with the class that it is derived from."""

import inspect
import re
from pathlib import Path

from anabranch import errors

PAGE = Path(__file__).parents[2] / "docs" / "reference.md"


def test_the_reference_lists_every_error_after_its_base():
    table = PAGE.read_text().partition("\n## Errors\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| `(\w+)` \| (?:`(\w+)`)? ?\|", table, re.MULTILINE)
    every = dict(inspect.getmembers(errors, inspect.isclass))
    classes = {name: kind for name, kind in every.items() if issubclass(kind, errors.AnabranchError)}
    assert dict(rows) == {
        name: "" if name == "AnabranchError" else error.__base__.__name__ for name, error in classes.items()
    }
    listed = [name for name, _ in rows]
    assert all(base in listed[:number] for number, (_, base) in enumerate(rows) if base)
