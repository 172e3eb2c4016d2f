"""Hand-offs in simulated fleets break no promise: declined or forced when handlers outlast the drain, and away from a
worker that cannot read.
"""

import pytest
from harsh.fleet import HarshFleet
from harsh.options import HarshOptions
from msgspec.structs import replace

from anabranch.errors import AccessDeniedError
from anabranch.events import HandOffForced, HandOffKept, LeaseGiven, LeaseTaken, MemberEvicted
from anabranch.testing.world.kinesis import SimulatedKinesis
from anabranch.testing.world.worker import SimulatedWorker

SLOW = HarshOptions(
    worker_count=3, shard_count=4, record_count=150, faulty_seconds=30.0, stop_every_seconds=8.0,
    handler_seconds_max=1.5, drain_seconds=0.05,
)  # fmt: skip
CUT_OFF_AT, CUT_OFF_SECONDS = 15.0, 185.0
PATIENT = HarshOptions(worker_count=2, shard_count=4, record_count=300, faulty_seconds=200.0, handler_seconds_max=0.02)


@pytest.fixture
def said(monkeypatch):
    """All events of all workers, as (worker, second, event)."""
    said, on_event = [], SimulatedWorker._on_event

    def note(worker, event):
        said.append((worker, worker.process.clock._loop.time(), event))
        on_event(worker, event)

    monkeypatch.setattr(SimulatedWorker, "_on_event", note)
    return said


def count(said, kind):
    return sum(isinstance(event, kind) for _, _, event in said)


def live(seed, options, at=None, fault=None):
    """Runs a fleet, with an extra fault at a given second. Returns the violations."""
    fleet = HarshFleet(seed, options)
    if at is not None:
        fleet.loop.call_at(at, fault, fleet)
    return fleet.run().violations


@pytest.mark.parametrize("order", ["shard", "key"])
def test_a_forced_hand_off_breaks_no_promise(order, said):
    for seed in range(4):
        assert live(seed, replace(SLOW, order=order, hand_off="force")) == ()
    assert count(said, HandOffForced) > 3
    assert count(said, LeaseGiven) >= count(said, HandOffForced)
    assert not count(said, HandOffKept)


@pytest.mark.parametrize("order", ["shard", "key"])
def test_a_shard_that_does_not_drain_is_kept_and_breaks_no_promise(order, said):
    for seed in range(4):
        assert live(seed, replace(SLOW, order=order, hand_off="keep")) == ()
    assert count(said, HandOffKept) > 3
    assert not count(said, HandOffForced)


def test_a_worker_that_cannot_read_gives_its_shards_to_one_that_can_and_gets_none_back_for_a_while(said):
    def cut_off(fleet):
        fleet.workers[0].process.cut_until["stream"] = CUT_OFF_AT + CUT_OFF_SECONDS

    assert live(1, PATIENT, CUT_OFF_AT, cut_off) == ()
    given = [(worker, at) for worker, at, event in said if isinstance(event, LeaseGiven) and at > CUT_OFF_AT]
    assert len(given) == 2, "its half of the shards"
    assert all(CUT_OFF_AT + 55 < at < CUT_OFF_AT + 80 for _, at in given)
    (unwell, _), _ = given
    taken_back = [at for worker, at, event in said if isinstance(event, LeaseTaken) and worker is unwell]
    assert all(at < CUT_OFF_AT for at in taken_back)


def test_a_worker_that_stalls_keeps_its_leases_because_its_heartbeats_continue(said):
    assert live(1, PATIENT, CUT_OFF_AT, lambda fleet: fleet.workers[0].process.stall(60.0)) == ()
    assert not count(said, MemberEvicted)


class Denied:
    """One process may not read one shard any more; it may read all others."""

    def __init__(self, monkeypatch):
        self.process = self.shard_id = None
        self._shard_of = {}
        self._get_iterator, self._get_records = SimulatedKinesis.get_shard_iterator, SimulatedKinesis.get_records
        denied = self

        async def get_shard_iterator(self, stream, shard_id, position):
            denied._check(self._process, shard_id)
            iterator = await denied._get_iterator(self, stream, shard_id, position)
            denied._shard_of[iterator] = shard_id
            return iterator

        async def get_records(self, stream, iterator, **options):
            shard_id = denied._shard_of[iterator]
            denied._check(self._process, shard_id)
            response = await denied._get_records(self, stream, iterator, **options)
            denied._shard_of[response.next_shard_iterator] = shard_id
            return response

        monkeypatch.setattr(SimulatedKinesis, "get_shard_iterator", get_shard_iterator)
        monkeypatch.setattr(SimulatedKinesis, "get_records", get_records)

    def begin(self, fleet):
        unlucky = fleet.workers[0]
        self.process = unlucky.process
        self.shard_id = next(iter(unlucky._consumer_run.sessions)).shard_id

    def _check(self, process, shard_id):
        if (process, shard_id) == (self.process, self.shard_id):
            raise AccessDeniedError("not this one", operation="GetRecords", code="AccessDeniedException")


def test_one_shard_that_a_worker_cannot_read_is_given_to_one_that_can_and_is_not_asked_for_again_for_a_while(
    said, monkeypatch
):
    denied = Denied(monkeypatch)
    assert live(1, PATIENT, CUT_OFF_AT, denied.begin) == ()
    given = [(worker, at, event) for worker, at, event in said if isinstance(event, LeaseGiven) and at > CUT_OFF_AT]
    (unwell, at, gift), *returned = given
    assert (unwell.process, gift.shard_id) == (denied.process, denied.shard_id)
    assert CUT_OFF_AT + 55 < at < CUT_OFF_AT + 80
    assert denied.shard_id not in {event.shard_id for _, _, event in returned}, "another shard goes back for fairness"
