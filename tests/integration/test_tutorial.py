"""The quick start, as its reader would do it: its files, and the commands of its shell blocks, in several terminals.

Two things differ: anabranch is installed already, and the server has a free port instead of 4567.
"""

import contextlib
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from patience import PATIENCE, wait_for

from services import free_port

PAGE = (Path(__file__).parents[2] / "docs" / "tutorial.md").read_text()
_FILE = re.compile(r"^```python\n(# file: (\w+\.py)\n.*?)^```", re.MULTILINE | re.DOTALL)
_SHELL = re.compile(r"^```sh\n(.*?)^```", re.MULTILINE | re.DOTALL)


class Terminals:
    """Shells in which commands run. What they print goes to files."""

    def __init__(self, home, preparation):
        self._home, self._preparation = home, preparation
        self._environment = {
            **os.environ, "HOME": str(home), "XDG_STATE_HOME": str(home / "state"),
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        }  # fmt: skip

    def run(self, command):
        done = subprocess.run(
            ["bash", "-ec", f"{self._preparation}\n{command}"], env=self._environment, capture_output=True,
            text=True, timeout=PATIENCE, check=False,
        )  # fmt: skip
        assert done.returncode == 0, f"$ {command}\n{done.stdout}{done.stderr}"
        return done.stdout

    @contextlib.contextmanager
    def running(self, command, name, *, prepared=True):
        script = f"{self._preparation}\n{command}" if prepared else command
        printed = self._home / name
        with printed.open("w") as output:
            process = subprocess.Popen(
                ["bash", "-ec", script], env=self._environment, stdout=output, stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL, start_new_session=True,
            )  # fmt: skip
        try:
            yield printed
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
            process.wait(timeout=PATIENCE)


def wait_for_print(printed, pattern, after=0):
    try:
        return wait_for(lambda: re.search(pattern, printed.read_text()[after:]), repr(pattern))
    except TimeoutError as error:
        error.add_note(printed.read_text()[after:])
        raise


@pytest.mark.long
def test_the_commands_of_the_tutorial_do_what_it_says(tmp_path):
    folder, port = tmp_path / "tutorial", str(free_port())
    (folder / ".venv" / "bin").mkdir(parents=True)
    (folder / ".venv" / "bin" / "activate").touch()
    for block, name in _FILE.findall(PAGE):
        (folder / name).write_text(block)
    install, preparation, fleet, busy, watch, change = _SHELL.findall(PAGE)
    serve = f"{install.splitlines()[-1]} --port {port}"
    reshard, kill = change.splitlines()
    terminals = Terminals(tmp_path, preparation.replace("4567", port))
    with contextlib.ExitStack() as opened:
        served = opened.enter_context(terminals.running(serve, "serve", prepared=False))
        wait_for_print(served, "ready: ")
        terminals.run("python write.py")
        assert "read 1000 records" in terminals.run("python read.py")
        assert "read 0 records" in terminals.run("python read.py")
        opened.enter_context(terminals.running(fleet, "fleet"))
        opened.enter_context(terminals.running(busy, "busy"))
        top = opened.enter_context(terminals.running(watch, "top"))
        wait_for_print(top, "3 workers live, 2 shards: 2 reading; .*[1-9][0-9]* records/s")
        terminals.run(reshard)
        holder = wait_for_print(top, r"4 shards: 4 reading(?s:.*?)shardId-00000000000\d +reading +\S+:(\d+) ")[1]
        assert re.fullmatch(r"kill -9 \d+", kill)
        terminals.run(f"kill -9 {holder}")
        wait_for_print(top, "2 workers live, 4 shards: 4 reading; .*[1-9][0-9]* records/s", len(top.read_text()))
    assert " passed" in terminals.run("pytest")
