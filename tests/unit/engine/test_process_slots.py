"""Handler processes: a cancelled call ends with its process and does not affect other calls."""

import asyncio
import functools
import importlib
import multiprocessing
import operator
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import BrokenExecutor
from pathlib import Path

import pytest

from anabranch._engine.handler_calls import ProcessSlots
from anabranch.errors import ConfigurationError
from patience import PATIENCE

from stream_world import run, until

asking = functools.partial(operator.methodcaller, "__call__")
"""Calls what it is given."""


def write_and_sleep(path):
    Path(path).write_text(str(os.getpid()))
    time.sleep(600)


class Loading:
    """A handler that another process gets by importing a module."""

    def __init__(self, module):
        self._module = module

    def __reduce__(self):
        return importlib.import_module, (self._module,)

    def __call__(self, record):
        raise AssertionError("it is never called here")


def is_gone(process_id):
    try:
        os.kill(process_id, 0)
    except ProcessLookupError:
        return True
    return False


def test_a_call_that_is_given_up_ends_with_its_process_and_the_next_gets_another(tmp_path):
    async def main():
        slots, path = ProcessSlots(1, operator.call), tmp_path / "id"
        calling = asyncio.create_task(slots.run(asking(write_and_sleep, str(path))))
        await until(lambda: path.exists() and path.read_text() != "", "the call")
        calling.cancel()
        with pytest.raises(asyncio.CancelledError):
            await calling
        process_id = int(path.read_text())
        await until(lambda: is_gone(process_id), "the end of the process")
        assert await slots.run(asking(os.getpid)) != process_id
        slots.close()

    run(main)


def test_a_call_that_is_given_up_before_it_started_leaves_the_process_to_the_next():
    async def main():
        slots = ProcessSlots(1, operator.call)
        calling = asyncio.create_task(slots.run(asking(os.getpid)))
        await asyncio.sleep(0)
        calling.cancel()
        with pytest.raises(asyncio.CancelledError):
            await calling
        first = await slots.run(asking(os.getpid))
        assert await slots.run(asking(os.getpid)) == first
        slots.close()
        await until(lambda: is_gone(first), "the end of the process")

    run(main)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_that_reaches_the_whole_group_is_left_to_the_parent(number):
    async def main():
        slots = ProcessSlots(1, operator.call)
        process_id = await slots.run(asking(os.getpid))
        os.kill(process_id, number)
        await slots.run(asking(time.sleep, 0.1))
        assert await slots.run(asking(os.getpid)) == process_id
        slots.close()

    run(main)


def test_a_process_that_is_killed_between_two_calls_fails_the_next_and_is_replaced():
    async def main():
        slots = ProcessSlots(1, operator.call)
        process_id = await slots.run(asking(os.getpid))
        os.kill(process_id, signal.SIGKILL)
        await until(lambda: is_gone(process_id), "the end of the process")
        with pytest.raises(BrokenExecutor):
            await slots.run(asking(os.getpid))
        assert await slots.run(asking(os.getpid)) != process_id
        slots.close()

    run(main)


def test_a_process_whose_handler_is_still_being_loaded_can_be_ended(tmp_path, monkeypatch):
    path = tmp_path / "id"
    (tmp_path / "endless_import.py").write_text(
        f"import os, time\nopen({str(path)!r}, 'w').write(str(os.getpid()))\ntime.sleep(600)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)

    async def main():
        slots = ProcessSlots(1, Loading("endless_import"))
        calling = asyncio.create_task(slots.run(asking(os.getpid)))
        await until(lambda: path.exists() and path.read_text() != "", "the import")
        slots.close()
        await until(lambda: is_gone(int(path.read_text())), "the end of the process")
        with pytest.raises(RuntimeError, match="exited while starting"):
            await calling

    run(main)


def test_a_process_can_be_ended_before_its_id_is_known(tmp_path, monkeypatch):
    (tmp_path / "another_endless_import.py").write_text("import time\ntime.sleep(600)\n")
    monkeypatch.syspath_prepend(tmp_path)

    async def main():
        slots = ProcessSlots(1, Loading("another_endless_import"))
        calling = asyncio.create_task(slots.run(asking(os.getpid)))
        await until(lambda: bool(multiprocessing.active_children()), "the process")
        slots.close()
        await until(lambda: not multiprocessing.active_children(), "the end of the process")
        with pytest.raises((RuntimeError, asyncio.CancelledError)):
            await calling

    run(main)


def test_a_handler_that_cannot_be_sent_to_a_process_is_refused_at_once():
    with pytest.raises(ConfigurationError, match="top level of a module"):
        ProcessSlots(1, lambda record: None)


PARENT = """
import asyncio, functools, operator, os, time
from anabranch._engine.handler_calls import ProcessSlots

asking = functools.partial(operator.methodcaller, "__call__")

async def main():
    slots = ProcessSlots(1, operator.call)
    print(await slots.run(asking(os.getpid)), flush=True)
    await slots.run(asking(time.sleep, 600))

if __name__ == "__main__":
    asyncio.run(main())
"""


def test_a_parent_that_is_killed_leaves_no_process_behind(tmp_path):
    program = tmp_path / "parent.py"
    program.write_text(PARENT)
    with subprocess.Popen([sys.executable, program], stdout=subprocess.PIPE) as parent:
        assert int(parent.stdout.readline()) != parent.pid
        parent.kill()
        parent.communicate(timeout=PATIENCE)  # the pipe ends with the last process that holds it
