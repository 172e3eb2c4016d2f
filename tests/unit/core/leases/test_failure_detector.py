from msgspec.structs import replace

from anabranch._core.leases.members import FailureDetector
from anabranch._core.leases.timing import lease_timing
from anabranch._model.leases import MemberRow

A = MemberRow(member_id="a#1", expiry_ms=10_000, counter=1)
B = MemberRow(member_id="b#1", expiry_ms=10_000, counter=1)
SEALED = replace(A, state="sealed")


def watching(*reads):
    """FailureDetector after reads, each (time, rows)."""
    detector = FailureDetector(lease_timing())
    for now_ms, rows in reads:
        detector.observe(rows, now_ms)
    return detector


def each_second(rows, begin_ms, end_ms):
    return [(now_ms, rows) for now_ms in range(begin_ms, end_ms + 1, 1_000)]


def test_a_member_whose_counter_does_not_change_for_the_expiry_can_be_sealed():
    detector = watching(*each_second([A], 0, 10_000))
    assert detector.sealable(9_999) == []
    assert detector.sealable(10_000) == [A]


def test_a_counter_that_moved_restarts_its_timer():
    moved = replace(A, counter=2)
    detector = watching(*each_second([A], 0, 8_000), *each_second([moved], 9_000, 18_000))
    assert detector.sealable(18_999) == []
    assert detector.sealable(19_000) == [moved]


def test_the_expiry_is_the_victims_own():
    quick, slow = replace(A, expiry_ms=3_000), replace(B, expiry_ms=30_000)
    detector = watching(*each_second([quick, slow], 0, 12_000))
    assert detector.sealable(12_000) == [quick]
    assert detector.expiry_ms_max == 30_000


def test_a_silence_longer_than_half_an_expiry_restarts_every_timer():
    detector = watching((0, [A]), (5_001, [A]))
    assert detector.sealable(15_000) == []
    assert detector.sealable(15_001) == [A]


def test_a_silence_restarts_only_the_timers_for_which_it_was_long():
    quick = replace(B, expiry_ms=5_000)
    detector = watching((0, [A, quick]), (4_000, [A, quick]), *each_second([A, quick], 5_000, 10_000))
    assert detector.sealable(8_999) == []
    assert detector.sealable(9_000) == [quick]
    assert detector.sealable(10_000) == [A, quick]


def test_a_fleet_that_polls_rarely_can_still_seal():
    members = [replace(A, member_id=f"m#{number}") for number in range(250)]
    detector = watching((0, members), (5_500, members), (10_000, members))
    assert len(detector.sealable(10_000)) == 250


def test_an_older_row_in_a_later_answer_is_ignored():
    detector = watching((0, [replace(A, counter=5)]), (1_000, [replace(A, counter=4)]))
    assert detector.row("a#1").counter == 5
    detector = watching((0, [SEALED]), (1_000, [A]))
    assert detector.row("a#1") is SEALED


def test_an_older_row_is_accepted_when_it_answers_a_write():
    detector = watching((0, [replace(A, counter=5)]))
    detector.observe_row(replace(A, counter=0), 20_000, is_answer=True)
    assert detector.row("a#1").counter == 0
    assert detector.sealable(29_999) == []
    assert detector.sealable(30_000) == [replace(A, counter=0)]


def test_an_end_is_accepted_whatever_the_counter():
    detector = watching((0, [replace(A, counter=5)]), (1_000, [replace(A, counter=0, state="sealed")]))
    assert detector.has_ended("a#1", 1_000)


def test_sealed_and_left_members_are_over_at_once():
    for state in ("sealed", "left"):
        detector = watching((0, [replace(A, state=state)]))
        assert detector.has_ended("a#1", 0)
        assert detector.sealable(60_000) == []
        assert detector.live() == []


def test_a_live_member_is_never_over_and_an_unknown_one_is_not_known_to_be():
    detector = watching((0, [A]))
    assert not detector.has_ended("a#1", 99_000)
    assert not detector.has_ended("z#1", 99_000)
    assert detector.row("z#1") is None


def test_a_missing_row_counts_from_the_first_answer_without_it():
    detector = watching((0, [A, B]), (1_000, [A, B]))
    assert detector.observe([B], 2_000)
    assert not detector.observe([B], 3_000)
    assert not detector.has_ended("a#1", 11_999)
    assert detector.has_ended("a#1", 12_000)


def test_a_missing_row_that_comes_back_lives():
    detector = watching((0, [A, B]), (1_000, [B]), (2_000, [A, B]))
    assert not detector.has_ended("a#1", 60_000)
    assert [row.member_id for row in detector.live()] == ["a#1", "b#1"]


def test_an_owner_without_a_row_is_waited_out_for_the_longest_expiry():
    detector = watching((0, [replace(B, expiry_ms=20_000)]))
    detector.observe_owners({"z#1": None}, 1_000)
    assert not detector.has_ended("z#1", 20_999)
    assert detector.has_ended("z#1", 21_000)


def test_a_missing_member_that_no_lease_names_is_forgotten():
    detector = watching((0, [A, B]), (1_000, [B]))
    detector.observe_owners({"b#1": None}, 2_000)
    assert not detector.has_ended("a#1", 60_000)


def test_members_known_to_be_dead_can_be_sealed_at_once():
    assert watching((0, [A, B])).sealable(0, {"b#1"}) == [B]


def test_what_others_plan_by_is_a_change_and_a_heartbeat_is_none():
    detector = watching((0, [A]))
    assert not detector.observe([replace(A, counter=2)], 1_000)
    for change in ({"change_count": 1}, {"draining": True}, {"reads_healthy": False}, {"state": "left"}):
        detector = watching((0, [A]))
        assert detector.observe([replace(A, counter=2, **change)], 1_000), change


def test_rows_of_members_long_over_are_named_for_deletion():
    detector = watching((0, [SEALED, B]))
    assert detector.ended_before(-1) == []
    assert detector.ended_before(0) == ["a#1"]


def test_after_a_rollback_of_the_store_members_are_observed_again():
    detector = watching((0, [replace(A, counter=9, expiry_ms=20_000)]))
    detector.forget()
    detector.observe([replace(A, counter=3)], 50_000)
    assert detector.row("a#1").counter == 3
    assert detector.expiry_ms_max == 20_000


def test_a_change_of_the_membership_is_timed_and_news_of_a_member_are_none():
    detector = watching((1_000, [A]), (2_000, [replace(A, counter=2, change_count=1, reads_healthy=False)]))
    assert detector.membership_changed_ms == 1_000
    for now_ms, rows in (
        (3_000, [A, B]),
        (4_000, [A, replace(B, draining=True)]),
        (5_000, [A]),
        (6_000, [A, B]),
        (7_000, [A, replace(B, state="left")]),
    ):
        detector.observe(rows, now_ms)
        assert detector.membership_changed_ms == now_ms


def test_a_member_beats_only_if_its_counter_was_seen_to_move_a_moment_ago():
    watches = watching((0, [A, B]))
    assert not watches.is_heartbeating("a#1", 0)
    assert not watches.is_heartbeating("nobody#1", 0)
    watches.observe([replace(A, counter=2), replace(B, counter=2, state="left")], 1_000)
    assert watches.is_heartbeating("a#1", 6_000)
    assert not watches.is_heartbeating("a#1", 6_001)
    assert not watches.is_heartbeating("b#1", 1_000)
    watches.observe([replace(A, counter=2)], 20_000)
    assert not watches.is_heartbeating("a#1", 20_000)
    watches.observe([], 20_100)
    assert not watches.is_heartbeating("a#1", 20_100)


def test_a_sealed_member_counts_as_live_only_with_a_row_that_was_created_again():
    detector = watching((0, [SEALED]), (1_000, [A]))
    assert detector.has_ended("a#1", 1_000), "an older row, in a later answer"
    assert detector.observe([replace(A, counter=2)], 2_000)
    assert not detector.has_ended("a#1", 2_000), "it was deleted, and a late registration made it again"
