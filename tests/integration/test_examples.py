"""Every example runs as its page says, against a local Kinesis, and prints what it promises."""

import os
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest

from services import moto_dynamodb

EXAMPLES = Path(__file__).parents[2] / "examples"
PROMISED = {
    "enrich.py": "enriched 100 orders, clean stop: True",
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
    "lambda_function.py": "total 41",
    "dead_letter_function.py": "charged 41 to customer-1",
}


def test_every_example_is_run():
    assert {path.name for path in EXAMPLES.glob("*.py")} == set(PROMISED)


@pytest.mark.long
@pytest.mark.parametrize("name", sorted(PROMISED))
def test_an_example_runs_and_prints_what_it_promises(name, tmp_path):
    program = [sys.executable, str(EXAMPLES / name)]
    serve = [sys.executable, "-m", "anabranch", "serve", "--create", "orders:4", "--"]
    environment = {**os.environ, "XDG_STATE_HOME": str(tmp_path)}
    with moto_dynamodb() if "dynamodb" in name else nullcontext() as dynamodb:
        if dynamodb is not None:
            environment["AWS_ENDPOINT_URL_DYNAMODB"] = dynamodb.url
        done = subprocess.run(
            [*serve, *program], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=90, check=False
        )
    assert done.returncode == 0, done.stderr
    assert PROMISED[name] in done.stdout
