"""Handlers in processes: loading a handler there takes its time, which is no call's, and may fail, which is said."""

import importlib

import pytest

from anabranch import Retry, events
from anabranch.errors import ShardStoppedError

from stream_world import run, stream_world


class InModule:
    """A handler that another process gets by importing its module, which this one need not do."""

    def __init__(self, module):
        self._module = module

    def __reduce__(self):
        return _handler_of, (self._module,)

    def __call__(self, record):
        raise AssertionError("it is called in another process")


def _handler_of(module):
    return importlib.import_module(module).handle


def consume(handler, **retry):
    """What happened to one record, and the report."""
    happened, reports = [], []

    async def main():
        async with stream_world(1) as world:
            world.put("a")
            consumer = world.consumer(
                app="billing", leases="memory://", until="tip", on_event=happened.append, on_failure=Retry(**retry)
            )
            try:
                reports.append(await consumer.run(handler, processes=1))
            except ShardStoppedError as error:
                reports.append(error.report)

    run(main, 40)
    return happened, reports[0]


def test_loading_a_handler_uses_up_no_calls_time(tmp_path, monkeypatch):
    handled = tmp_path / "handled"
    (tmp_path / "slow_to_load.py").write_text(
        f"import time\ntime.sleep(1.5)\ndef handle(record):\n    open({str(handled)!r}, 'ab').write(record.data)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    happened, report = consume(InModule("slow_to_load"), attempts=1, timeout=0.5)
    assert report.clean
    assert handled.read_bytes() == b"0"
    assert not [event for event in happened if isinstance(event, events.HandlerFailed)]


@pytest.mark.parametrize(
    "text, cause",
    [
        ("import no_such_module", "ModuleNotFoundError: No module named 'no_such_module'"),
        ("raise SystemExit('not here')", "SystemExit: not here"),
    ],
)
def test_a_handler_that_cannot_be_loaded_fails_its_record_with_the_cause(tmp_path, monkeypatch, text, cause):
    (tmp_path / "fails_to_load.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    happened, _ = consume(InModule("fails_to_load"), attempts=2, backoff=0.01, timeout=5)
    failed = [event.error for event in happened if isinstance(event, events.HandlerFailed)]
    assert failed == [f"RuntimeError: the handler could not be loaded in a new process: {cause}"] * 2
    (stop,) = [event for event in happened if isinstance(event, events.ShardStopped)]
    assert cause in stop.reason


def test_a_call_that_takes_too_long_is_ended_with_its_process(tmp_path, monkeypatch):
    (tmp_path / "sleeps_at_first.py").write_text(
        "import pathlib, time\n"
        "def handle(record):\n"
        f"    path = pathlib.Path({str(tmp_path / 'called')!r})\n"
        "    if not path.exists():\n"
        "        path.touch()\n"
        "        time.sleep(600)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    happened, report = consume(InModule("sleeps_at_first"), attempts=2, backoff=0.01, timeout=1)
    assert report.clean
    (failed,) = [event for event in happened if isinstance(event, events.HandlerFailed)]
    assert failed.error.startswith("TimeoutError")
