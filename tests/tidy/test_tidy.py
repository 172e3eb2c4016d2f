"""The code style, as tests: every rule holds in `src`, and every rule can fail."""

import ast
import subprocess
import tomllib
from collections import Counter
from pathlib import Path

import pytest
import rules

REPOSITORY = Path(__file__).parents[2]
SOURCE = REPOSITORY / "src" / "anabranch"
FOLDERS = {
    "browser", "chaos", "conformance", "fuzz", "integration", "property", "simulation", "tidy", "typing", "unit",
}  # fmt: skip

PLANTED = {
    rules.no_opening: "x = 1\n",
    rules.long_function: "def f():\n" + "    pass\n" * (rules.FUNCTION_LINES_MAX + 1),
    rules.deep_nesting: "if a:\n if b:\n  if c:\n   if d:\n    if e:\n     pass\n",
    rules.banned_call: "import asyncio\nasyncio.create_task(f())\n",
    rules.swallowed_cancellation: "try:\n    f()\nexcept BaseException:\n    pass\n",
    rules.unfinished: "# TO" + "DO: later\n",
    rules.iterated_set: "for name in set(names): pass\n",
    rules.missing_value: "class C:\n    def __init__(self):\n        self.a: int\n",
    rules.repeated_export: '__all__ = ["a", "a"]\n',
}


@pytest.mark.parametrize("path", sorted(SOURCE.rglob("*.py")), ids=lambda path: str(path.relative_to(SOURCE)))
def test_the_source_keeps_the_rules_of_the_house(path):
    assert list(rules.findings(path, SOURCE)) == []


@pytest.mark.parametrize("rule", rules.RULES + rules.CORE_RULES, ids=lambda rule: rule.__name__)
def test_every_rule_catches_a_planted_violation(rule):
    source = PLANTED[rule]
    assert list(rule(ast.parse(source), source))


def test_a_chain_of_elif_is_no_nesting():
    source = "if a:\n pass\nelif b:\n pass\nelif c:\n pass\nelif d:\n pass\nelif e:\n pass\nelif f:\n pass\n"
    assert not list(rules.deep_nesting(ast.parse(source), source))


def test_every_test_file_is_in_a_known_folder_under_a_name_of_its_own():
    files = sorted((REPOSITORY / "tests").rglob("test_*.py"))
    assert {path.relative_to(REPOSITORY / "tests").parts[0] for path in files} <= FOLDERS
    assert [name for name, count in Counter(path.name for path in files).items() if count > 1] == []


def test_every_module_is_imported_by_something():
    sources = [path for folder in ("src", "tests", "benchmarks") for path in (REPOSITORY / folder).rglob("*.py")]
    text = "\n".join(path.read_text() for path in sources) + (REPOSITORY / "pyproject.toml").read_text()
    text += (REPOSITORY / "Makefile").read_text()
    modules = [path for path in SOURCE.rglob("*.py") if path.name not in {"__init__.py", "__main__.py"}]
    lonely = [
        str(path.relative_to(SOURCE))
        for path in modules
        if (dotted := ".".join(path.relative_to(SOURCE.parent).with_suffix("").parts)) not in text
        and f"from {dotted.rpartition('.')[0]} import" not in text
        and path.parent.name != "_cli"  # found by their names
    ]
    assert lonely == []


def test_a_class_name_stands_once_outside_the_local_server():
    names = Counter(
        node.name
        for path in SOURCE.rglob("*.py")
        if path.relative_to(SOURCE).parts[0] != "local"  # which shares no code with the client, and has AWS's names too
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef)
    )
    assert [name for name, count in names.items() if count > 1] == []


def test_no_compiled_module_knows_msgspec():
    """mypyc breaks `!=` on a Struct, and a subclass of a compiled class that is not compiled."""
    hooks = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]
    compiled = hooks["hooks"]["mypyc"]["include"]
    assert compiled
    assert [name for name in compiled if "msgspec." in (REPOSITORY / name).read_text().partition('\n"""\n')[2]] == []


def test_no_tracked_file_names_a_place_of_the_machine_it_was_written_on():
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=REPOSITORY, capture_output=True, check=False)
    if listed.returncode:
        pytest.skip("not a git checkout")
    places = ("/wo" + "rk/", "/ro" + "ot/", "/fa" + "rm/")
    guilty = [
        name
        for name in listed.stdout.decode().split("\0")
        if name and (path := REPOSITORY / name).is_file() and any(p in path.read_text(errors="replace") for p in places)
    ]
    assert guilty == []
