"""Records as lines of text."""

import argparse

import pytest

from anabranch._cli.tail import DEFAULT_FORMAT, format_argument, text_line
from anabranch.records import Record

RECORD = Record(
    stream="orders",
    shard_id="shardId-000000000003",
    sequence_number="49",
    sub_sequence_number=2,
    partition_key="user-1",
    arrival_seconds=1.5,
    data=b"caf\xc3\xa9 \xff",
)


def line(text, record=RECORD, *, for_terminal=False):
    return text_line(format_argument(text), record, for_terminal=for_terminal)


@pytest.mark.parametrize(
    "text, shown",
    [
        ("%s", "café \\xff"),
        ("%S %b", "7 Y2Fmw6kg/w=="),
        ("%k|%n|%p|%t", "user-1|49:2|shardId-000000000003|orders"),
        ("%T %e", "1970-01-01T00:00:01.500Z 1500"),
        (r"100%% \t|\n|\\|\x", "100% \t|\n|\\|\\x"),
        ("plain", "plain"),
        (DEFAULT_FORMAT, "1970-01-01T00:00:01.500Z  shardId-000000000003  user-1  café \\xff"),
    ],
)
def test_each_letter_stands_for_a_field(text, shown):
    assert line(text) == shown


@pytest.mark.parametrize("text", ["%q", "50%", "%T %"])
def test_an_unknown_letter_is_refused(text):
    with pytest.raises(argparse.ArgumentTypeError, match="is not a placeholder; use"):
        format_argument(text)


def test_a_terminal_gets_no_control_characters_from_a_record():
    hostile = Record(
        stream="s", shard_id="p", sequence_number="1", partition_key="a\nb", arrival_seconds=0.0, data=b"\x1b[2J\tx\r"
    )
    assert line(r"%k\t%s", hostile, for_terminal=True) == "a\\nb\t\\x1b[2J\tx\\r"
    assert line(r"%k\t%s", hostile) == "a\nb\t\x1b[2J\tx\r"
