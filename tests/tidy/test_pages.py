"""Pages are easy to read where they are shown: code fits the column, and links lead somewhere, on GitHub too."""

import re
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *(ROOT / "examples").rglob("*.md")],
    key=lambda page: page.relative_to(ROOT),
)
CODE_COLUMNS_MAX = 88
"""A page of the docs is 46em wide. Longer lines of code get a scroll bar."""
_FENCE = re.compile(r"^( *)```([^\n]*)\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)
_SHOWN_FILE = re.compile(r"^```\{literalinclude\} (\S+)$", re.MULTILINE)
_INDENTED_CODE = re.compile(r"\n\n {4}(?=\S)")
_LINK = re.compile(r"\]\(([^)\s]+)\)")
_OURS = re.compile(r"https://github\.com/anabranch/anabranch/(?:blob|tree)/main/(.*)")
_ROLE = re.compile(r"\{\w+\}`")


def named(page):
    return str(page.relative_to(ROOT))


def wide_lines(page):
    text = page.read_text()
    blocks = [block for _, language, block in _FENCE.findall(text) if not language.startswith("{")]
    blocks += [(page.parent / shown).read_text() for shown in _SHOWN_FILE.findall(text)]
    return [line for block in blocks for line in block.splitlines() if len(line) > CODE_COLUMNS_MAX]


def prose(text):
    return re.sub(r"`[^`\n]*`", "``", _FENCE.sub("", text))


def github_anchors(text):
    """The ids that GitHub gives to headings. Sphinx checks its own."""
    headings = re.findall(r"^#+ +(.*?)\s*$", _FENCE.sub("", text), re.MULTILINE)
    slugs = [re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings]
    seen: Counter[str] = Counter()
    for slug in slugs:
        yield f"{slug}-{seen[slug]}" if seen[slug] else slug
        seen[slug] += 1


def broken_links(page):
    for link in _LINK.findall(prose(page.read_text())):
        place, _, anchor = link.partition("#")
        target = page.parent / place if place else page
        if ours := _OURS.fullmatch(place):
            target = ROOT / ours[1]
        elif "://" in link:
            continue
        if not target.exists() or (
            anchor and target.suffix == ".md" and anchor not in github_anchors(target.read_text())
        ):
            yield link


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_code_fits_the_page(page):
    assert wide_lines(page) == []
    assert not _INDENTED_CODE.search(_FENCE.sub("", page.read_text())), "code that is not fenced is not checked"


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_every_link_leads_to_a_file_and_a_heading(page):
    assert list(broken_links(page)) == []


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_no_page_needs_sphinx_to_show_a_link(page):
    assert _ROLE.findall(prose(page.read_text())) == []


def test_a_wide_line_a_missing_file_and_a_missing_heading_are_noticed(tmp_path):
    page = tmp_path / "page.md"
    shown = tmp_path / "shown.yaml"
    shown.write_text("y" * 90)
    code = f"```text\n{'x' * 89}\n```\n```{{literalinclude}} shown.yaml\n```\n"
    page.write_text(f"# One ...\n[a](b.md) [c](#one) [d](#one-) [e](page.md#two)\n{code}")
    assert wide_lines(page) == ["x" * 89, "y" * 90]
    assert list(broken_links(page)) == ["b.md", "#one", "page.md#two"]
