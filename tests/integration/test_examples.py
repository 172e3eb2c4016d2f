"""Every example runs as its page says, against a local Kinesis, and prints what it promises."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
PROMISED = {
    "enrich.py": "enriched 100 orders, clean stop: True",
    "batch_to_sqlite.py": "1000 orders in the database",
    "threads.py": "handled 200 orders in threads, clean stop: True",
    "lambda_function.py": "total 41",
}


def test_every_example_is_run():
    assert {path.name for path in EXAMPLES.glob("*.py")} == set(PROMISED)


@pytest.mark.long
@pytest.mark.parametrize("name", sorted(PROMISED))
def test_an_example_runs_and_prints_what_it_promises(name, tmp_path):
    program = [sys.executable, str(EXAMPLES / name)]
    serve = [sys.executable, "-m", "anabranch", "serve", "--create", "orders:4", "--"]
    environment = {**os.environ, "XDG_STATE_HOME": str(tmp_path)}
    done = subprocess.run(
        [*serve, *program], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert PROMISED[name] in done.stdout
