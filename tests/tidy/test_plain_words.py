"""Turns of phrase that need a second reading stay out of everything that a person reads."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = ("src", "docs", "examples", "benchmarks", "requirements")
BANNED = {
    r"\banew\b": "again",
    r"\bwhoever\b": "name who: the worker, the caller",
    r"\bin vain\b": "say what does not happen",
    r"\bst(an|oo)ds? still\b": "is stalled, does not change",
    r"\bfor ever\b": "forever",
    r"\bof one mind\b": "share the same settings",
    r"\bwho knows\b": "None if unknown",
    r"\bis told from\b|\btold apart\b": "is distinguished from",
    r"\bt(akes?|ook) no notice\b": "ignores",
    r"\bspeaks? for (itself|themselves|that)\b": "say what it does",
    r"\bin hand\b": "current, unfinished",
    r"\bnor any other\b": "say what there is",
    r"\bis no more than a courtesy\b": "is only advisory",
    r"\bcomes? to the knowledge\b": "learns",
    r"\bfor who(m)? wants\b": "optional",
    r"\bshow(s|ed)? no life\b": "missed its heartbeats",
    r"\bone life of\b": "one run of",
    r"\ball the same\b": "still, anyway",
    r"\bby the kernel's word\b": "the OS says",
}
"""A pattern, and what to write instead."""


def texts():
    files = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*") if path.suffix in {".py", ".md", ".in"}]
    files += (ROOT / "docs" / "files").iterdir()
    files += [ROOT / name for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "Makefile")]
    return [path for path in files if "_build" not in path.parts]


def found_in(text: str) -> list[str]:
    joined = re.sub(r"\s*\n[ #>*|]*", " ", text)  # a phrase may go over the end of a line
    return [
        f"{match[0]!r}: write {instead!r}"
        for pattern, instead in BANNED.items()
        for match in re.finditer(pattern, joined, re.IGNORECASE)
    ]


def test_no_text_has_a_banned_turn():
    found = {str(path.relative_to(ROOT)): found_in(path.read_text()) for path in texts()}
    assert not {path: turns for path, turns in found.items() if turns}


def test_no_test_name_has_a_banned_turn():
    modules = [path.read_text() for path in (ROOT / "tests").rglob("*.py")]
    names = [name for text in modules for name in re.findall(r"def (test_\w+)", text)]
    assert not {name: turns for name in names if (turns := found_in(name.replace("_", " ")))}


@pytest.mark.parametrize("text", ["It is created anew.", "a shard that\n    stands still", "# the record in\n# hand"])
def test_a_banned_turn_is_noticed(text):
    assert found_in(text)
