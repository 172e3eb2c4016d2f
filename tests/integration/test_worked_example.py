"""The worked example of docs/failures.md, as its reader would do it: its files, its commands, what they print."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from anabranch.testing.doubles import run_local_kinesis

PAGE = Path(__file__).parents[2] / "docs" / "failures.md"
_FILE = re.compile(r"^```python\n(# file: (\w+\.py)\n.*?)^```", re.MULTILINE | re.DOTALL)
_CONSOLE = re.compile(r"^```console\n(.*?)^```", re.MULTILINE | re.DOTALL)


def steps(text):
    """Each command with the lines that it prints."""
    for block in _CONSOLE.findall(text):
        for step in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
            command, *lines = step.splitlines()
            yield command, [line for line in lines if line]


def fits(line, printed):
    pattern = ".*".join(re.escape(part) for part in line.split("..."))
    return any(re.fullmatch(pattern, one) for one in printed)


@pytest.mark.long
def test_the_commands_of_the_page_print_what_it_says(tmp_path):
    text = PAGE.read_text().partition("## A worked example")[2]
    for block, name in _FILE.findall(text):
        (tmp_path / name).write_text(block)
    with run_local_kinesis(create={"orders": 1}) as kinesis:
        environment = {
            **os.environ, **kinesis.environment(), "XDG_STATE_HOME": str(tmp_path / "state"),
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        }  # fmt: skip
        for command, lines in steps(text):
            ended = subprocess.run(
                ["bash", "-c", command], cwd=tmp_path, env=environment, capture_output=True,
                text=True, timeout=60, check=False,
            )  # fmt: skip
            printed = ended.stdout + ended.stderr
            missing = [line for line in lines if not fits(line, printed.splitlines())]
            assert missing == [], f"$ {command}\n{printed}"
