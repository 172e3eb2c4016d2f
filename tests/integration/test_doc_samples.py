"""Every Python sample of the README and the docs is run, as its reader would run it, against a local Kinesis.

A block is one program; one without a call of its own `main` gets it. The files that a page names (`# file: work.py`)
lie beside each of its programs. A block fenced as anything but `python` is not a sample; one fenced as `py` shows the
code of another library, and only its syntax is checked.
"""

import os
import re
import subprocess
import sys
import time
from contextlib import nullcontext
from pathlib import Path

import pytest

from anabranch.testing.doubles import run_local_kinesis
from patience import PATIENCE

from services import moto_dynamodb

REPOSITORY = Path(__file__).parents[2]
PAGES = [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").glob("*.md"))]
FIRST_PAGES = {"README.md", "index.md", "tutorial.md"}
"""The samples of the other pages take longer, and run in `make test-all`."""
_BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
_NAMED = re.compile(r"# file: (\w+\.py)\n")
_READS = 8
"""A consumer that has made this many calls of GetRecords works: it is told to end."""


def _blocks():
    for page in PAGES:
        blocks = _BLOCK.findall(page.read_text())
        files = {named[1]: block for block in blocks if (named := _NAMED.match(block))}
        for number, block in enumerate(blocks, 1):
            marks = () if page.name in FIRST_PAGES else pytest.mark.long
            yield pytest.param(block, files, id=f"{page.name}-{number}", marks=marks)


@pytest.mark.parametrize("block, files", list(_blocks()))
def test_a_sample_runs_as_it_is_printed(block, files, tmp_path):
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    if "def test_" in block:
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_sample.py"]
        (tmp_path / "test_sample.py").write_text(block)
    else:
        program = block
        if "import anabranch" not in program and "from anabranch" not in program:
            program = "import asyncio, anabranch\n" + program
        if "async def main" in program and "asyncio.run(main" not in program:
            program += "\nasyncio.run(main())\n"
        command = [sys.executable, "sample.py"]
        (tmp_path / "sample.py").write_text(program)
    dynamodb = moto_dynamodb() if '"dynamodb://' in block else nullcontext()
    with run_local_kinesis(create={"orders": 2}) as kinesis, dynamodb as store:
        environment = {**os.environ, **kinesis.environment(), "XDG_STATE_HOME": str(tmp_path / "state")}
        if store is not None:
            environment["AWS_ENDPOINT_URL_DYNAMODB"] = store.url
        reads = kinesis.faults.on("GetRecords").delay(0)
        sample = subprocess.Popen(
            command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        if _runs_forever(block):
            deadline = time.monotonic() + PATIENCE
            while reads.matched < _READS and sample.poll() is None and time.monotonic() < deadline:
                time.sleep(0.05)
            if sample.poll() is None:
                sample.terminate()  # it must end cleanly, as with Ctrl-C
        output, _ = sample.communicate(timeout=PATIENCE)
    assert sample.returncode in ({0, -15} if _runs_forever(block) else {0}), output
    assert "Traceback" not in output, output


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_code_of_other_libraries_is_python(page):
    for block in re.findall(r"^```py\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL):
        compile(block, page.name, "exec")


def test_the_decoder_of_the_docs_reads_what_async_kinesis_writes():
    """The bytes are from its MsgpackProcessor, version 3.0.1."""
    page = (REPOSITORY / "docs" / "migrate.md").read_text()
    (block,) = [block for block in _BLOCK.findall(page) if "def netstrings" in block]
    names = {}
    exec(compile(block, "migrate.md", "exec"), names)
    written = b"8:\x81\xa5order\x00,8:\x81\xa5order\x01,16:\x81\xa5order\xa81:2,3:4,,"
    assert names["netstrings"](written) == [{"order": 0}, {"order": 1}, {"order": "1:2,3:4,"}]


def _runs_forever(block):
    reads = "Consumer(" in block
    return reads and "until=" not in block and "def test_" not in block
