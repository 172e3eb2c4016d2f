"""Runs the test folders one after another and says how long each took.

    python tests/run.py tests/unit tests/property -m "not long"

One pytest a folder, so that a folder's time is its own; both cores within a folder. A folder in which the expression
selects nothing is passed over. Ends with one line for each folder and exits non-zero if any failed.
"""

import os
import subprocess
import sys
import time
from pathlib import Path

NOTHING_COLLECTED = 5


def main(arguments: list[str]) -> int:
    folders = [argument for argument in arguments if argument.startswith("tests/")]
    options = [argument for argument in arguments if not argument.startswith("tests/")]
    rows: list[tuple[str, float, int]] = []
    for folder in folders:
        if not any(Path(folder).rglob("test_*.py")):
            continue
        workers = ["-n", str(min(2, os.cpu_count() or 1)), "--dist", "worksteal"]
        started = time.monotonic()
        code = subprocess.run(
            [sys.executable, "-m", "pytest", folder, "-q", "--no-header", *workers, *options], check=False
        ).returncode
        if code != NOTHING_COLLECTED:
            rows.append((folder, time.monotonic() - started, code))
    for folder, seconds, code in rows:
        print(f"{folder:<20} {seconds:6.1f} s  {'passed' if code == 0 else 'FAILED'}")
    if not rows:
        print("no test was selected")
    return int(not rows or any(code for _, _, code in rows))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
