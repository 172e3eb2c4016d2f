import pytest
from msgspec.structs import replace

from anabranch._core.leases.admission import (
    Admission,
    Review,
    differing_members,
    differs,
    fingerprint,
    namesakes,
    precedes,
)
from anabranch._core.leases.failure_detector import Stopwatches
from anabranch._core.leases.plan import Seal
from anabranch._core.leases.timing import lease_timing
from anabranch._model.leases import MemberRow

ME = MemberRow(member_id="me#1", worker_id="me", expiry_ms=10_000, fingerprint="order key", joined_wall_ms=500)
LIKE = replace(ME, member_id="like#1")
OTHER = replace(ME, member_id="other#1", fingerprint="order shard", joined_wall_ms=400)
LATER = replace(OTHER, joined_wall_ms=600)
ADMITTED, WAITS = Review(is_admitted=True), Review()


def reviews(*looks, dead=()):
    """What follows from one look after another, a second apart."""
    admission = Admission(ME, lease_timing())
    return [admission.review(rows, dead, second * 1_000) for second, rows in enumerate(looks)]


def test_who_is_alone_or_among_its_like_is_admitted():
    assert reviews([]) == [ADMITTED]
    assert reviews([ME, LIKE]) == [ADMITTED]


def test_members_that_are_over_or_dead_for_certain_do_not_count():
    assert reviews([replace(OTHER, state="sealed"), replace(OTHER, state="left")]) == [ADMITTED]
    assert reviews([OTHER], dead=["other#1"]) == [ADMITTED]


@pytest.mark.parametrize("registered", [[], [ME]])
def test_a_member_of_another_mind_that_is_seen_to_beat_refuses(registered):
    other = replace(OTHER, counter=4)
    moved = replace(OTHER, counter=5)
    assert reviews([*registered, other], [*registered, moved]) == [WAITS, Review(refused_by=moved)]


@pytest.mark.parametrize("registered", [[], [ME]])
def test_a_row_that_shows_no_life_is_sealed_at_its_own_expiry(registered):
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


def test_what_came_after_the_first_look_is_not_waited_for_unless_it_beats():
    newcomer = replace(OTHER, member_id="new#1")
    assert reviews([ME, LATER], [ME, newcomer]) == [WAITS, ADMITTED]
    beating = replace(newcomer, counter=1)
    assert reviews([ME, LATER], [ME, LATER, newcomer], [ME, LATER, beating])[2] == Review(refused_by=beating)


def test_beside_a_member_of_its_own_mind_nobody_gives_way_to_one_that_only_joins():
    confirmed = replace(LIKE, counter=3)
    assert reviews([ME, OTHER, confirmed]) == [ADMITTED]
    assert reviews([ME, OTHER, LIKE]) == [Review(refused_by=OTHER)]
    assert reviews([ME, replace(OTHER, counter=1), confirmed]) == [WAITS]


def test_an_older_protocol_gives_way_to_a_newer_and_not_the_other_way_round():
    newer = replace(ME, protocol="2.0")
    assert differs(ME, newer)
    assert not differs(newer, ME)
    assert not differs(ME, replace(ME, protocol="1.7"))


def test_who_came_first_is_the_same_for_everybody():
    assert precedes(OTHER, ME)
    assert not precedes(ME, OTHER)
    assert precedes(replace(OTHER, joined_wall_ms=500, member_id="a"), ME)


def test_only_strangers_that_live_are_seen():
    stopwatches = Stopwatches(lease_timing())
    stopwatches.observe([ME, OTHER, LIKE], 0)
    assert differing_members(ME, stopwatches, 0) == []
    beating = replace(OTHER, counter=1)
    stopwatches.observe([ME, beating, replace(LIKE, counter=1)], 1_000)
    assert differing_members(ME, stopwatches, 1_000) == [beating]


def test_who_may_joins_workers_of_any_order_but_never_of_other_streams_or_a_newer_protocol():
    me = replace(ME, fingerprint=fingerprint(["b", "a"], "key"))
    by_shard = replace(OTHER, fingerprint=fingerprint(["a", "b"], "shard"), counter=1)
    elsewhere = replace(by_shard, fingerprint=fingerprint(["a"], "key"))
    newer = replace(by_shard, protocol="2.0")
    assert [differs(me, row) for row in (by_shard, elsewhere, newer)] == [True, True, True]
    assert [differs(me, row, any_order=True) for row in (by_shard, elsewhere, newer)] == [False, True, True]
    assert Admission(me, lease_timing(), any_order=True).review([by_shard], (), 0) == ADMITTED
    stopwatches = Stopwatches(lease_timing())
    stopwatches.observe([by_shard], 0)
    stopwatches.observe([replace(by_shard, counter=2)], 1_000)
    assert differing_members(me, stopwatches, 1_000, any_order=True) == []


def test_a_stream_may_be_named_by_one_and_given_as_an_arn_by_another():
    arn, elsewhere = (f"arn:aws:kinesis:us-east-1:{account}:stream/orders" for account in (111122223333, 444455556666))
    by_name = replace(ME, fingerprint=fingerprint(["audit", "orders"], "key"))
    by_arn = replace(ME, fingerprint=fingerprint(["audit", arn], "key"))
    assert not differs(by_name, by_arn)
    assert not differs(by_arn, by_name)
    assert differs(by_arn, replace(ME, fingerprint=fingerprint(["audit", elsewhere], "key")))
    assert differs(by_name, replace(ME, fingerprint=fingerprint([arn], "key")))
    assert differs(by_name, replace(ME, fingerprint=fingerprint([arn, "payments"], "key")))


def test_namesakes_are_live_members_of_the_same_worker_id():
    mine, over = replace(ME, member_id="me#0"), replace(ME, member_id="me#-1", state="left")
    assert namesakes("me", [mine, over, replace(OTHER, worker_id="other")]) == [mine]
