"""`python tests/simulation/engine_evidence.py`: in how many of 50 fleets each planted mistake of the engine is noticed.

It prints the table of docs/how-it-is-tested.md, in a few minutes on one core.
"""

import sys

import pytest
from fleets import run_seed
from variants.engine_variants import MISTAKES

FLEETS = 50


def caught(name: str) -> int:
    mistake = MISTAKES[name]
    with pytest.MonkeyPatch.context() as monkeypatch:
        mistake.plant(monkeypatch)
        verdicts = [run_seed(seed, mistake.options) for seed in range(FLEETS)]
    return sum(any(found.promise == mistake.promise for found in verdict.violations) for verdict in verdicts)


def main() -> None:
    for name, mistake in MISTAKES.items():
        sys.stdout.write(f"| {name} | {mistake.promise} | {caught(name)} |\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
