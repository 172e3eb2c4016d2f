"""Events in the log: their fields as `extra=`, and as JSON."""

import io
import json
import logging

import pytest

from anabranch import events
from anabranch.logs import JsonFormatter, event_fields, make_emit
from anabranch.measures import TimeBuckets
from anabranch.reasons import PausedByProgram

STALLED = events.ShardStalled(stream="orders", shard_id="shardId-7", reason=PausedByProgram())


@pytest.fixture
def lines():
    """The JSON documents that were logged."""
    out, log = io.StringIO(), logging.getLogger("anabranch")
    handler = logging.StreamHandler(out)
    handler.setFormatter(JsonFormatter())
    log.addHandler(handler)
    before, log.level = log.level, logging.DEBUG
    yield lambda: [json.loads(line) for line in out.getvalue().splitlines()]
    log.removeHandler(handler)
    log.setLevel(before)


def test_a_line_has_the_fields_of_its_event(lines):
    make_emit(None)(STALLED)
    (line,) = lines()
    assert (line["level"], line["logger"], line["event"]) == ("WARNING", "anabranch", "ShardStalled")
    assert (line["stream"], line["shard_id"], line["reason"]) == ("orders", "shardId-7", "paused-by-program")
    assert line["message"] == str(STALLED)
    assert line["time"].endswith("Z")


def test_a_histogram_is_plain_json(lines):
    calls = TimeBuckets()
    calls.add(3)
    flow = events.ShardProgress(
        seconds=1.0, read_count=1, read_bytes=2, handled_count=1, handled_bytes=2, committed_count=0, failed_count=0,
        calls=calls, lag=None,
    )  # fmt: skip
    make_emit(None)(flow)
    (line,) = lines()
    assert line["calls"] == {"counts": calls.counts, "total_ms": 3}


def test_a_failed_call_has_its_traceback_on_the_same_line(lines):
    error = ValueError("no such customer\x1b[2J")
    make_emit(None)(
        events.HandlerFailed(
            position="7", partition_key="a", attempt=1, error=repr(error), retry_in_ms=None, exception=error
        )
    )
    (line,) = lines()
    assert "ValueError: no such customer" in line["traceback"]
    assert (line["attempt"], line["partition_key"]) == (1, "a")
    assert "exception" not in line


def test_a_traceback_begins_at_the_handler_and_not_at_our_code_that_called_it(lines):
    def handle(record):
        return record["amount"]

    for handler, shown, hidden in [(handle, "in handle", "call_handler"), (None, "in call_handler", "in handle")]:
        engine = {"__name__": "anabranch._engine.calls", "handler": handler}
        exec("def call_handler():\n    handler({})", engine)
        with pytest.raises((KeyError, TypeError)) as caught:
            engine["call_handler"]()
        error = caught.value.with_traceback(caught.value.__traceback__.tb_next)  # without this test
        make_emit(None)(
            events.HandlerFailed(
                position="7", partition_key="a", attempt=1, error=repr(error), retry_in_ms=None, exception=error
            )
        )
        traceback = lines()[-1]["traceback"]
        assert shown in traceback
        assert hidden not in traceback


def test_records_of_the_users_own_loggers_are_json_too():
    record = logging.makeLogRecord({"name": "app", "msg": "charged %s", "args": ("user-1",), "levelname": "INFO"})
    record.amount, record.when = 3, object
    document = json.loads(JsonFormatter().format(record))
    assert (document["message"], document["amount"], document["logger"]) == ("charged user-1", 3, "app")
    assert document["when"] == str(object)


class Unshowable:
    def __str__(self):
        raise LookupError("no name")


CIRCULAR = {"a": 1}
CIRCULAR["itself"] = [CIRCULAR]


@pytest.mark.parametrize(
    "value, shown",
    [
        ({(1, 2): 3}, {"(1, 2)": 3}),
        ({"a": {1}, (None,): b"x"}, {"a": [1], "(None,)": "b'x'"}),
        (Unshowable(), "<Unshowable that cannot be shown: LookupError>"),
        ({Unshowable(): 1}, {"<Unshowable that cannot be shown: LookupError>": 1}),
        ([float("nan"), float("inf"), -float("inf"), 1.5], ["nan", "inf", "-inf", 1.5]),
        ([10**5_000], ["<int that cannot be shown: ValueError>"]),
        ("\ud800\n", "\ud800\n"),
    ],
)  # fmt: skip
def test_whatever_is_logged_is_one_line_of_valid_json(value, shown):
    record = logging.makeLogRecord({"name": "app", "msg": "charged", "levelname": "INFO", "by": value})
    line = JsonFormatter().format(record)
    assert "\n" not in line
    document = json.loads(line, parse_constant=pytest.fail)
    assert (document["message"], document["by"]) == ("charged", shown)


def test_a_value_that_contains_itself_ends_somewhere():
    record = logging.makeLogRecord({"msg": "charged", "by": CIRCULAR})
    document = json.loads(JsonFormatter().format(record))
    assert document["by"]["itself"][0]["itself"][0]["a"] == 1


@pytest.mark.parametrize("arguments", [(Unshowable(),), (1, 2)])
def test_a_message_that_cannot_be_formatted_is_shown_without_its_arguments(arguments):
    record = logging.makeLogRecord({"msg": "charged %s", "args": arguments})
    message = json.loads(JsonFormatter().format(record))["message"]
    assert message.startswith("charged %s (its arguments cannot be formatted: ")


@pytest.mark.parametrize("kind", events.Event.__subclasses__())
def test_no_field_of_an_event_hides_one_of_a_log_record(kind):
    """`logging` refuses such an `extra=`."""
    own = {*vars(logging.makeLogRecord({})), "message", "asctime", "event"}
    assert not own & set(kind.__struct_fields__)
    assert not {"time", "level", "logger", "process", "traceback"} & set(kind.__struct_fields__)


def test_fields_are_made_only_if_the_event_is_logged(monkeypatch):
    from anabranch import logs as module

    monkeypatch.setattr(module, "event_fields", lambda event: pytest.fail("nobody reads them"))
    logging.getLogger("anabranch").setLevel(logging.ERROR)
    try:
        make_emit(None)(STALLED)
    finally:
        logging.getLogger("anabranch").setLevel(logging.NOTSET)
    assert event_fields(STALLED)["event"] == "ShardStalled"
