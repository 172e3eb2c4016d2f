"""The page about reasons lists each of them, with the text and the advice that the code has."""

from pathlib import Path

from reason_samples import RECORD, SAMPLES

PAGE = Path(__file__).parents[2] / "docs" / "reasons.md"


def table():
    return [
        f"| `{reason.code}` | {reason.text.replace(RECORD['position'], '4959…:0')} | {reason.advice} |"
        for reason in SAMPLES
    ]


def test_the_page_about_reasons_lists_all_of_them():
    _, _, rows = PAGE.read_text().partition("|---|---|---|\n")
    assert rows.splitlines() == table(), "\n".join(["the table should be:", *table()])
