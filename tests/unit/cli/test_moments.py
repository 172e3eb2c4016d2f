"""Times as people write and read them."""

import argparse
import datetime as dt

import pytest

from anabranch._cli.options import ago, end_argument, join_spans, rate, start_argument, timestamp


@pytest.mark.parametrize(
    "given, joined",
    [
        (["tail", "orders", "--from", "-15m"], ["tail", "orders", "--from=-15m"]),
        (["--from", "-1.5h", "--to", "-5s"], ["--from=-1.5h", "--to=-5s"]),
        (["--from=-15m", "-15m"], ["--from=-15m", "-15m"]),
        (["put", "orders", "-15m"], ["put", "orders", "-15m"]),
        (["--", "-15m"], ["--", "-15m"]),
        (["which", "--", "--from", "-15m"], ["which", "--", "--from", "-15m"]),
        (["-n", "-15m"], ["-n", "-15m"]),
        (["--from", "-n"], ["--from", "-n"]),
    ],
)
def test_a_span_after_an_option_is_its_value(given, joined):
    assert join_spans(given) == joined


@pytest.mark.parametrize(
    "text, seconds", [("-90s", 90), ("15m", 900), ("-1.5h", 5_400), ("-2d", 172_800), ("-1w", 604_800)]
)
def test_a_span_counts_back_from_now(text, seconds):
    now = dt.datetime.now(dt.UTC).timestamp()
    assert start_argument(text).timestamp() == pytest.approx(now - seconds, abs=2)


def test_words_and_iso_times_are_understood():
    assert start_argument("latest") == "latest"
    assert start_argument("HORIZON") == start_argument("trim-horizon") == "trim_horizon"
    assert start_argument("2026-01-31T09:30Z") == dt.datetime(2026, 1, 31, 9, 30, tzinfo=dt.UTC)
    assert start_argument("2026-01-31T09:30+02:00") == dt.datetime(2026, 1, 31, 7, 30, tzinfo=dt.UTC)
    assert start_argument("2026-01-31") == dt.datetime(2026, 1, 31).astimezone(dt.UTC)
    assert end_argument("now").tzinfo is dt.UTC


@pytest.mark.parametrize("text", ["", "soon", "-15", "15x", "2026-13-01", "-9999999w"])
def test_what_is_no_time_is_refused(text):
    with pytest.raises(argparse.ArgumentTypeError, match="is not a time: write now, -15m"):
        end_argument(text)


def test_durations_and_rates_are_short():
    spans = [0.04, 59.9, 60, 3_599, 7_200, 172_799, 180_000, 259_200]
    assert [ago(seconds) for seconds in spans] == [
        "0.0 s",
        "59.9 s",
        "1.0 min",
        "60.0 min",
        "2.0 h",
        "48.0 h",
        "2.1 d",
        "3.0 d",
    ]
    assert (ago(None), ago(1.5), rate(None)) == ("-", "1.5 s", "-")
    assert [rate(value) for value in (0, 0.4, 9.96, 12.6)] == ["0", "0.4", "10.0", "13"]
    assert timestamp(1.5) == "1970-01-01T00:00:01.500Z"
