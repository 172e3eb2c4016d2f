import pytest
from msgspec.structs import replace

from anabranch._core.leases.members import (
    Admission,
    FailureDetector,
    Review,
    incompatible_members,
    is_incompatible,
    joined_before,
)
from anabranch._core.leases.plan import Seal
from anabranch._core.leases.timing import lease_timing
from anabranch._model.leases import MemberRow

ME = MemberRow(member_id="me#1", expiry_ms=10_000, order="key", joined_wall_ms=500)
LIKE = replace(ME, member_id="like#1")
OTHER = replace(ME, member_id="other#1", order="shard", joined_wall_ms=400)
LATER = replace(OTHER, joined_wall_ms=600)
ADMITTED, WAITS = Review(is_admitted=True), Review()


def reviews(*looks, dead=()):
    """What follows from one look after another, a second apart."""
    admission = Admission(ME, lease_timing())
    return [admission.review(rows, dead, second * 1_000) for second, rows in enumerate(looks)]


def test_a_member_that_is_alone_or_among_compatible_members_is_admitted():
    assert reviews([]) == [ADMITTED]
    assert reviews([ME, LIKE]) == [ADMITTED]


def test_members_that_are_over_or_dead_for_certain_do_not_count():
    assert reviews([replace(OTHER, state="sealed"), replace(OTHER, state="left")]) == [ADMITTED]
    assert reviews([OTHER], dead=["other#1"]) == [ADMITTED]


@pytest.mark.parametrize("registered", [[], [ME]])
def test_an_incompatible_member_that_sends_heartbeats_refuses(registered):
    other = replace(OTHER, counter=4)
    moved = replace(OTHER, counter=5)
    assert reviews([*registered, other], [*registered, moved]) == [WAITS, Review(refused_by=moved)]


@pytest.mark.parametrize("registered", [[], [ME]])
def test_a_row_without_heartbeats_is_sealed_at_its_own_expiry(registered):
    row = replace(OTHER, counter=4, expiry_ms=3_000)
    looks = [[*registered, row]] * 4
    sealed = [*registered, replace(row, state="sealed")]
    assert reviews(*looks, sealed) == [WAITS, WAITS, WAITS, Review(seals=(Seal("other#1", 4),)), ADMITTED]


def test_before_its_row_is_written_a_worker_waits_for_what_becomes_of_another_that_joins():
    assert reviews([OTHER], [replace(OTHER, state="left")]) == [WAITS, ADMITTED]


def test_of_two_that_join_at_once_the_later_leaves_and_the_earlier_waits_for_it():
    assert reviews([ME, OTHER]) == [Review(refused_by=OTHER)]
    assert reviews([ME, LATER], [ME, replace(LATER, state="left")]) == [WAITS, ADMITTED]


def test_the_earlier_leaves_if_the_later_was_admitted_before_it_could_be_seen():
    beating = replace(LATER, counter=1)
    assert reviews([ME, LATER], [ME, beating]) == [WAITS, Review(refused_by=beating)]


def test_a_member_that_joins_after_the_first_read_is_waited_for_only_if_it_sends_heartbeats():
    newcomer = replace(OTHER, member_id="new#1")
    assert reviews([ME, LATER], [ME, newcomer]) == [WAITS, ADMITTED]
    beating = replace(newcomer, counter=1)
    assert reviews([ME, LATER], [ME, LATER, newcomer], [ME, LATER, beating])[2] == Review(refused_by=beating)


def test_beside_a_compatible_member_no_member_yields_to_one_that_only_joins():
    confirmed = replace(LIKE, counter=3)
    assert reviews([ME, OTHER, confirmed]) == [ADMITTED]
    assert reviews([ME, OTHER, LIKE]) == [Review(refused_by=OTHER)]
    assert reviews([ME, replace(OTHER, counter=1), confirmed]) == [WAITS]


def test_an_older_protocol_gives_way_to_a_newer_and_not_the_other_way_round():
    newer = replace(ME, protocol="2.0")
    assert is_incompatible(ME, newer)
    assert not is_incompatible(newer, ME)
    assert not is_incompatible(ME, replace(ME, protocol="1.7"))


def test_all_members_agree_on_which_one_joined_first():
    assert joined_before(OTHER, ME)
    assert not joined_before(ME, OTHER)
    assert joined_before(replace(OTHER, joined_wall_ms=500, member_id="a"), ME)


def test_only_live_incompatible_members_are_seen():
    detector = FailureDetector(lease_timing())
    detector.observe([ME, OTHER, LIKE], 0)
    assert incompatible_members(ME, detector, 0) == []
    beating = replace(OTHER, counter=1)
    detector.observe([ME, beating, replace(LIKE, counter=1)], 1_000)
    assert incompatible_members(ME, detector, 1_000) == [beating]


def test_any_order_admits_workers_of_another_order_but_not_of_a_newer_protocol_and_streams_may_differ():
    me = replace(ME, streams=("a", "b"))
    by_shard = replace(OTHER, streams=("a", "b"), counter=1)
    elsewhere = replace(by_shard, order="key", streams=("a",))
    newer = replace(by_shard, protocol="2.0")
    assert [is_incompatible(me, row) for row in (by_shard, elsewhere, newer)] == [True, False, True]
    assert [is_incompatible(me, row, any_order=True) for row in (by_shard, elsewhere, newer)] == [False, False, True]
    assert Admission(me, lease_timing(), any_order=True).review([by_shard], (), 0) == ADMITTED
    detector = FailureDetector(lease_timing())
    detector.observe([by_shard], 0)
    detector.observe([replace(by_shard, counter=2)], 1_000)
    assert incompatible_members(me, detector, 1_000, any_order=True) == []
