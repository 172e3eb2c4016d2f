"""Handler processes: a call that is given up ends with its process, and concerns no other call."""

import asyncio
import functools
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from anabranch._engine.handling.process_slots import ProcessSlots

from stream_world import run, until


def write_and_sleep(path):
    Path(path).write_text(str(os.getpid()))
    time.sleep(600)


def is_gone(process_id):
    try:
        os.kill(process_id, 0)
    except ProcessLookupError:
        return True
    return False


def test_a_call_that_is_given_up_ends_with_its_process_and_the_next_gets_another(tmp_path):
    async def main():
        slots, path = ProcessSlots(1), tmp_path / "id"
        calling = asyncio.create_task(slots.run(functools.partial(write_and_sleep, str(path))))
        await until(lambda: path.exists() and path.read_text() != "", "the call", 25)
        calling.cancel()
        with pytest.raises(asyncio.CancelledError):
            await calling
        process_id = int(path.read_text())
        await until(lambda: is_gone(process_id), "the end of the process")
        assert await slots.run(os.getpid) != process_id
        slots.close()

    run(main, 50)


def test_a_call_that_is_given_up_before_it_started_leaves_the_process_to_the_next():
    async def main():
        slots = ProcessSlots(1)
        calling = asyncio.create_task(slots.run(os.getpid))
        await asyncio.sleep(0)
        calling.cancel()
        with pytest.raises(asyncio.CancelledError):
            await calling
        first = await slots.run(os.getpid)
        assert await slots.run(os.getpid) == first
        slots.close()
        await until(lambda: is_gone(first), "the end of the process")

    run(main, 50)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_that_reaches_the_whole_group_is_left_to_the_parent(number):
    async def main():
        slots = ProcessSlots(1)
        process_id = await slots.run(os.getpid)
        os.kill(process_id, number)
        await slots.run(functools.partial(time.sleep, 0.1))
        assert await slots.run(os.getpid) == process_id
        slots.close()

    run(main, 50)


PARENT = """
import asyncio, functools, os, time
from anabranch._engine.handling.process_slots import ProcessSlots

async def main():
    slots = ProcessSlots(1)
    print(await slots.run(os.getpid), flush=True)
    await slots.run(functools.partial(time.sleep, 600))

if __name__ == "__main__":
    asyncio.run(main())
"""


def test_a_parent_that_is_killed_leaves_no_process_behind(tmp_path):
    program = tmp_path / "parent.py"
    program.write_text(PARENT)
    with subprocess.Popen([sys.executable, program], stdout=subprocess.PIPE) as parent:
        assert int(parent.stdout.readline()) != parent.pid
        parent.kill()
        parent.communicate(timeout=15)  # the pipe ends with the last process that holds it
