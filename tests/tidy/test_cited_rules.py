"""The rules that the code cites by letter and number are written down, and every rule is cited."""

import re
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
CITED = re.compile(r"\brules? ((?:(?:[A-Z]\d+|INV-1)(?:, | and | to )?)+)|\b(INV-1)\b")
NAMED = re.compile(r"^\*\*([A-Z]+-?\d+)(?:,|\*\*)", re.MULTILINE)


def cited_rules():
    found = set()
    for path in sorted([*(REPOSITORY / "src").rglob("*.py"), *(REPOSITORY / "tests").rglob("*.py")]):
        if path == Path(__file__):
            continue
        for several, one in CITED.findall(path.read_text()):
            found |= set(re.findall(r"[A-Z]+-?\d+", several or one))
    return found


def test_every_rule_that_is_cited_is_written_down_once_and_every_written_one_is_cited():
    written = NAMED.findall((REPOSITORY / "docs" / "protocol.md").read_text())
    assert len(written) == len(set(written))
    assert cited_rules() - set(written) == set()
    assert set(written) - cited_rules() == set()
