"""Whatever the order in which workers of different settings look, register and look again: those that stay agree."""

from hypothesis import given, strategies as st
from msgspec.structs import replace

from anabranch._core.leases.members import Admission, is_incompatible
from anabranch._core.leases.rows import heartbeat, leave, seal_member
from anabranch._core.leases.timing import lease_timing
from anabranch._model.leases import HeartbeatWrite, MemberRow

MOST_TURNS = 100


class Joiner:
    """One worker: registers, looks until it is admitted or refused, then beats. Each turn is one call to the store."""

    def __init__(self, number, mind, joined_wall_ms):
        self.row = MemberRow(member_id=f"w#{number}", expiry_ms=10_000, order=mind, joined_wall_ms=joined_wall_ms)
        self.state = "outside"
        self.beats = 0
        self._admission = Admission(self.row, lease_timing())
        self._seals = []

    def turn(self, store, now_ms):
        name = self.row.member_id
        if self.state == "outside":
            store[name], self.state = self.row, "joining"
        elif self.state == "joining" and self._seals:
            seal = self._seals.pop()
            store[seal.member_id] = seal_member(store[seal.member_id], seal.observed_counter)
        elif self.state == "joining":
            review = self._admission.review(list(store.values()), (), now_ms)
            self._seals = list(review.seals)
            if review.refused_by is not None:
                self.state = "refused"
            elif review.is_admitted:
                self.state = "admitted"
        elif self.state == "refused":
            store[name] = leave(store[name])
        elif self.state == "admitted":
            self.beats += 1
            store[name] = heartbeat(store[name], HeartbeatWrite(member_id=name, attempt=self.beats))


@given(
    st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, 3)), min_size=2, max_size=4),
    st.lists(st.integers(0, 3), max_size=24),
)
def test_workers_with_different_settings_never_both_stay_and_one_does(workers, schedule):
    store = {}
    joiners = [Joiner(number, *worker) for number, worker in enumerate(workers)]
    turns = [joiners[turn % len(joiners)] for turn in schedule] + joiners * MOST_TURNS
    for turn, joiner in enumerate(turns):
        joiner.turn(store, turn * 100)
        live = [one.row for one in joiners if one.state == "admitted" and store[one.row.member_id].state == "live"]
        assert not any(is_incompatible(one, other) for one in live for other in live)
    assert all(joiner.state in {"admitted", "refused"} for joiner in joiners)
    assert any(joiner.state == "admitted" for joiner in joiners)


@given(st.integers(0, 3), st.lists(st.booleans(), max_size=12))
def test_a_late_worker_of_another_mind_never_ends_a_fleet_that_runs(joined_wall_ms, schedule):
    """Whatever the clocks say of who came first."""
    store = {}
    first, late = Joiner(0, "a", 2), Joiner(1, "b", joined_wall_ms)
    for turn in range(4):
        first.turn(store, turn)
    assert first.state == "admitted"
    for turn, is_first in enumerate([*schedule, *([True, False] * MOST_TURNS)]):
        (first if is_first else late).turn(store, 100 * turn)
    assert (first.state, late.state) == ("admitted", "refused")
    assert store["w#0"] == replace(first.row, counter=first.beats)
