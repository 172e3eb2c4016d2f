"""Hand-offs in simulated fleets whose handlers outlast the drain: kept or forced, no promise is broken by them."""

import pytest

from anabranch.events import HandOffForced, HandOffKept, LeaseGiven
from anabranch.testing.loop import SimulationLoop, run
from anabranch.testing.world import FleetOptions
from anabranch.testing.world.world import Fleet


def live(seed, hand_off, order):
    """A fleet that comes and goes, with handlers that outlast a hand-off; what it said, and what broke."""
    options = FleetOptions(
        worker_count=3, shard_count=4, record_count=150, faulty_seconds=30.0, stops_each=8.0, order=order,
        handler_seconds_max=1.5, hand_off=hand_off, drain_seconds=0.05,
    )  # fmt: skip
    loop = SimulationLoop(seed)
    fleet = Fleet(seed, options, loop)
    run(fleet.live, loop=loop)
    said = [type(event) for worker in fleet.workers for event in worker.events]
    return said, fleet.journal.violations


@pytest.mark.parametrize("order", ["shard", "key"])
def test_a_forced_hand_off_breaks_no_promise(order):
    said = []
    for seed in range(6):
        some, violations = live(seed, "force", order)
        said += some
        assert violations == []
    assert said.count(HandOffForced) > 3
    assert said.count(LeaseGiven) >= said.count(HandOffForced)
    assert HandOffKept not in said


@pytest.mark.parametrize("order", ["shard", "key"])
def test_a_shard_that_does_not_drain_is_kept_and_breaks_no_promise(order):
    said = []
    for seed in range(6):
        some, violations = live(seed, "keep", order)
        said += some
        assert violations == []
    assert said.count(HandOffKept) > 3
    assert HandOffForced not in said
