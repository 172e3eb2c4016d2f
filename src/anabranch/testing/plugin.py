"""The pytest plugin: installed with anabranch, so that its fixtures are there without an import.

It is loaded by every pytest run of whoever has anabranch installed: it imports nothing of ours until a fixture is used.
"""

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from anabranch.local import LocalKinesis
    from anabranch.testing.simulation import SimulationReport

__all__ = ["anabranch_simulation", "local_kinesis"]


@pytest.fixture
def local_kinesis(monkeypatch: pytest.MonkeyPatch) -> "Iterator[LocalKinesis]":
    """A local Kinesis for one test. The environment points every AWS client of the test at it."""
    from anabranch.testing.local_kinesis import run_local_kinesis  # noqa: PLC0415 -- see above

    with run_local_kinesis() as kinesis:
        for name, value in kinesis.environment().items():
            monkeypatch.setenv(name, value)
        yield kinesis


@pytest.fixture
def anabranch_simulation() -> "Callable[..., SimulationReport]":
    """`anabranch.testing.simulate`, with the run held to every promise: a broken one fails the test with its seed."""
    from anabranch.testing.simulation import simulate  # noqa: PLC0415 -- see above

    def run(*arguments: Any, **options: Any) -> "SimulationReport":
        report = simulate(*arguments, **options)
        report.check()
        return report

    return run
