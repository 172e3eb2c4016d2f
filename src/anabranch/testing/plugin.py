"""The pytest plugin. pytest finds it by itself, so its fixtures need no import.

pytest loads it in every project where anabranch is installed, so it imports anabranch only when a fixture is used.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from anabranch.local import LocalKinesis
    from anabranch.testing.simulation import SimulationReport


@pytest.fixture
def local_kinesis(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> "Iterator[LocalKinesis]":
    """A local Kinesis for one test. The environment makes every AWS client in the test use it, and keeps the leases of
    the test's applications in a file of its own: never in the store that ANABRANCH_LEASES named before.
    """
    from anabranch.testing.doubles import run_local_kinesis  # noqa: PLC0415 -- see above

    monkeypatch.setenv("ANABRANCH_LEASES", f"sqlite://{tmp_path / 'leases.db'}")
    with run_local_kinesis() as kinesis:
        for name, value in kinesis.environment().items():
            monkeypatch.setenv(name, value)
        yield kinesis


@pytest.fixture
def anabranch_simulation() -> "Callable[..., SimulationReport]":
    """Runs `anabranch.testing.simulate`. If the report has a broken promise, the test fails and names the seed."""
    from anabranch.testing.simulation import simulate  # noqa: PLC0415 -- see above

    def run(*arguments: Any, **options: Any) -> "SimulationReport":
        report = simulate(*arguments, **options)
        report.check()
        return report

    return run
