"""Every example runs as its page says, against a local Kinesis, and prints what it promises."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from patience import PATIENCE

EXAMPLES = Path(__file__).parents[2] / "examples"
PROMISED = {
    "enrich.py": "enriched 100 orders, each once: True, clean stop: True",
    "follow.py": "followed 50 records",
    "durable_job.py": "first run 100 records, second run 100, in both 0",
    "fence_token.py": "balance 41, the late write was refused",
    "dynamodb_fleet.py": "100 results, 0 repeats refused, clean stops: True",
    "fastapi_producer.py": "accepted 20 orders",
    "flask_producer.py": "accepted 20 orders",
    "poison_record.py": "handled 100 of 100 after the redrive, each once: True",
    "simulated_handler.py": "200 orders handled",
    "batch_to_sqlite.py": "1000 orders in the database",
    "threads.py": "handled 200 orders in threads, clean stop: True",
    "lambda_function.py": "total 4950 of 100 orders, aggregated: True",
    "dead_letter_function.py": "charged 41 to customer-1",
}


def test_every_example_is_run():
    assert {path.name for path in EXAMPLES.glob("*.py")} == set(PROMISED)


def commands():
    """The commands of the page: one for all examples, and those of examples that need more."""
    lines = re.findall(r"^```sh\n(.*?)\n```", (EXAMPLES / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    found = {line.rpartition("/")[2]: line for line in lines}
    return {name: found.get(name, lines[0].replace("enrich.py", name)) for name in PROMISED}


@pytest.mark.long
@pytest.mark.parametrize("name", sorted(PROMISED))
def test_an_example_runs_and_prints_what_it_promises(name, tmp_path):
    environment = {
        **os.environ, "XDG_STATE_HOME": str(tmp_path), "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    }  # fmt: skip
    done = subprocess.run(
        ["bash", "-c", commands()[name]], cwd=EXAMPLES.parent, env=environment,
        capture_output=True, text=True, timeout=1.5 * PATIENCE, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert PROMISED[name] in done.stdout
