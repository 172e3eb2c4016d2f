"""What is printed: nothing that controls the terminal, and nothing that is wider than it."""

import io
import json
import sys

import pytest
from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from anabranch._cli import output
from anabranch._cli.top import Scroll
from anabranch._demo.keyboard import keys_in

HOSTILE = {
    "a line break": "a\nb",
    "a carriage return": "a\rb",
    "CSI": "\x1b[2J",
    "CSI in one character": "\x9b2J",
    "OSC": "\x1b]0;title\x07",
    "OSC in one character": "\x9d0;title\x9c",
    "delete": "\x7f",
    "right to left": "\u202efdp.exe\u202c",
    "an isolate": "\u2066abc\u2069",
    "marks": "\u200e\u200f\u061c",
    "separators": "a\u2028b\u2029c",
}


@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE)
def test_nothing_hostile_is_left_and_nothing_is_lost(text):
    cleaned = output.clean(text)
    assert cleaned.isprintable()
    assert cleaned.encode().decode("unicode_escape") == text


def test_text_of_all_languages_is_left_as_it_is():
    for text in ("Grüße", "運賃", "שלום", "👩‍👧", "a\tb", "100 %"):
        assert output.clean(text) == text


@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE)
def test_json_is_harmless_and_means_the_same(text):
    for indent in (-1, 2):
        written = output.json_text({"key": text}, indent=indent)
        assert written.replace("\n", "").isprintable()
        assert json.loads(written) == {"key": text}


@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE)
def test_what_rich_draws_is_clean_too(text, monkeypatch):
    screen = io.StringIO()
    monkeypatch.setattr(sys, "stdout", screen)
    output.make_console().print(Text("<").append(text).append(">"))
    output.print_table(("A", "B"), [(text, output.styled(text))])
    output.show(text)
    assert all(line.isprintable() for line in screen.getvalue().split("\n"))


def lines_of(rows, width, headings=("APP", "WORKERS", "LEASES")):
    console = Console(force_terminal=True, width=width, file=io.StringIO())
    return [line.plain for line in output.table_lines(headings, rows, console, right=("WORKERS",))]


def test_a_last_column_that_does_not_fit_follows_below_its_row():
    url = "sqlite:////home/ann/.local/state/anabranch/billing.db"
    assert lines_of([("billing", "3", url), ("b", "1", "memory://")], 60) == [
        "APP      WORKERS  LEASES",
        "billing        3",
        f"  {url}",
        "b              1  memory://",
    ]
    assert lines_of([("billing", "3", url)], 80)[1] == f"billing        3  {url}"


def test_a_table_is_never_wider_than_the_terminal():
    rows = [("運" * 80, "12", "short"), ("b" * 90, "1", "x")]
    shown = lines_of(rows, 80)
    assert max(map(cell_len, shown)) <= 80
    assert [cell_len(line[: line.index("12") + 2]) for line in shown if "12" in line] == [
        cell_len(line[: line.index(" 1") + 2]) for line in shown if line.startswith("bbb")
    ]


def test_prose_is_wrapped_on_terminals_only():
    text = "the quick brown fox " * 10
    narrow = Console(force_terminal=True, width=40, file=io.StringIO())
    assert max(map(len, output.wrapped(text, narrow, indent="  ", hanging="   "))) <= 40
    assert output.wrapped(text.strip(), Console(file=io.StringIO()), indent="  ") == [f"  {text.strip()}"]
    assert output.wrapped("\x1b[2J\n", Console(file=io.StringIO())) == [r"\x1b[2J\n"]


def screen(count, height, *keys, sections=None):
    scroll = Scroll()
    head, body = [Text("head")], [Text(str(number)) for number in range(count)]
    sections = [[line] for line in body] if sections is None else sections
    shown = scroll.view(head, sections, height)
    for key in keys:
        scroll.on_key(key)
        shown = scroll.view(head, sections, height)
    assert len(shown) <= height
    return [line.plain for line in shown[1:]]


def test_a_long_frame_scrolls_and_says_where_it_is():
    first = screen(50, 12)
    assert first[:-1] == [str(number) for number in range(10)]
    assert first[-1].startswith("lines 1 to 10 of 50; arrow keys")
    assert screen(50, 12, "down", "j", "down", "up")[0] == "2"
    assert screen(50, 12, "page down")[0] == "9"
    assert screen(50, 12, "page down", "page up", "up")[0] == "0"
    assert screen(50, 12, "end")[:-1] == [str(number) for number in range(40, 50)]
    assert screen(50, 12, "G", "down", "down")[-2] == "49"
    assert screen(50, 12, "end", "home")[0] == "0"
    assert screen(11, 12, "down") == [str(number) for number in range(11)]


def test_the_headings_of_a_table_stay_while_it_scrolls():
    tables = [[Text(f"{name}{row}") for row in range(20)] for name in "ab"]
    assert screen(0, 12, sections=tables)[:2] == ["a0", "a1"]
    assert screen(0, 12, "down", "down", sections=tables)[:2] == ["a0", "a3"]
    assert screen(0, 12, "page down", "page down", sections=tables)[:3] == ["a0", "a19", "b0"]
    assert screen(0, 12, "end", sections=tables)[:2] == ["b0", "b11"]
    assert screen(0, 12, "end", sections=tables)[-2] == "b19"


def test_keys_are_distinguished_from_escape_sequences():
    assert keys_in("s\x1b[A\x1b[B\x1b[5~\x1b[6~\x1bOH\x1b[F\x1b[200~q") == [
        "s", "up", "down", "page up", "page down", "home", "end", "q",
    ]  # fmt: skip
