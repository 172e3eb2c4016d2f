from msgspec.structs import replace

from anabranch._core.leases.lease_table import MOVE_COOL_DOWN_MS, LeaseTable
from anabranch._core.leases.members import FailureDetector
from anabranch._core.leases.plan import (
    ASK_AGAIN_MS,
    MEMBER_KEPT_MS,
    SETTLING_MS,
    TAKES_MAX,
    DeleteMember,
    Drain,
    RequestHandOff,
    Seal,
    TakeLease,
    Write,
    plan_round,
)
from anabranch._core.leases.timing import lease_timing
from anabranch._model.leases import Finish, HandOffRequest, LeaseKey, LeaseRow, MemberRow

KEYS = [LeaseKey("1:orders:1", 0, f"shardId-{number:012}") for number in range(4)]
ME = MemberRow(member_id="me#1", expiry_ms=10_000)
DONOR = MemberRow(member_id="donor#1", expiry_ms=10_000)


def lease(number, owner=None, **fields):
    return LeaseRow(key=KEYS[number], owner=owner, version=5, epoch=2, **fields)


def take(key, expected_owner, expected_version):
    return TakeLease(key, ME.member_id, expected_owner, expected_version)


class Member:
    """One member's view, and what it plans."""

    def __init__(self, members, leases, member_id="me#1"):
        self.table = LeaseTable(member_id, 10_000)
        self.detector = FailureDetector(lease_timing())
        self.detector.observe(members, 0)
        self.table.observe_leases(leases, 0)
        self.detector.observe_owners({row.owner: None for row in leases if row.owner}, 0)

    def hear(self, now_ms):
        """Everybody has shown life."""
        rows = [replace(row, counter=row.counter + 1) for row in self.detector.live()]
        self.detector.observe(rows, now_ms)

    def plan(self, now_ms=0, **options):
        return plan_round(self.table, self.detector, now_ms, **({"may_take": True} | options))


def test_free_leases_are_taken():
    assert Member([ME], [lease(0), lease(1)]).plan() == [take(KEYS[0], None, 5), take(KEYS[1], None, 5)]


def test_leases_on_which_owners_died_are_taken_first():
    leases = [lease(0), lease(1, takes_without_progress=2), lease(2, takes_without_progress=4), lease(3)]
    assert [step.key for step in Member([ME], leases).plan()] == [KEYS[2], KEYS[1], KEYS[0], KEYS[3]]


def test_leases_of_a_sealed_or_left_member_are_taken():
    for state in ("sealed", "left"):
        member = Member([ME, replace(DONOR, state=state)], [lease(0, "donor#1")])
        assert member.plan() == [take(KEYS[0], "donor#1", 5)]


def test_a_silent_member_is_sealed_first():
    member = Member([ME, DONOR], [lease(0, "donor#1")])
    for now_ms in range(1_000, 10_001, 1_000):
        member.detector.observe([ME, DONOR], now_ms)
    assert member.plan(10_000) == [Seal("donor#1", 0)]


def test_no_member_seals_itself():
    member = Member([ME], [])
    assert member.plan(60_000) == []


def test_a_process_that_is_dead_for_certain_is_sealed_at_once():
    assert Member([ME, DONOR], [lease(0, "donor#1")]).plan(known_dead=["donor#1"]) == [Seal("donor#1", 0)]


def test_leases_of_an_owner_without_a_row_are_taken_after_its_expiry():
    member = Member([ME], [lease(0, "gone#1")])
    assert member.plan(9_999) == []
    assert member.plan(9_999 + ASK_AGAIN_MS) == [take(KEYS[0], "gone#1", 5)]


def test_nothing_is_taken_or_asked_for_while_that_is_forbidden():
    assert Member([ME, DONOR], [lease(0), lease(1, "donor#1"), lease(2, "donor#1")]).plan(may_take=False) == []


def test_a_live_member_is_asked_for_what_it_has_too_much_of():
    member = Member([ME, DONOR], [lease(0, "donor#1"), lease(1, "donor#1")])
    asked = [RequestHandOff("donor#1", HandOffRequest(KEYS[1], "me#1"))]
    assert member.plan() == asked
    assert member.plan(1_000) == []
    member.hear(ASK_AGAIN_MS)
    assert member.plan(ASK_AGAIN_MS) == asked


def test_a_request_that_still_lies_before_the_donor_is_not_repeated():
    member = Member([ME, DONOR], [lease(0, "donor#1"), lease(1, "donor#1")])
    member.plan()
    wanted = (HandOffRequest(KEYS[1], "me#1").short_name,)
    member.detector.observe([ME, replace(DONOR, counter=1, wanted=wanted)], 1_000)
    assert member.plan(ASK_AGAIN_MS) == []


def test_an_unanswered_request_is_forgotten_in_the_end():
    member = Member([ME, DONOR], [lease(0, "donor#1"), lease(1, "donor#1")])
    member.plan()
    wanted = (HandOffRequest(KEYS[1], "me#1").short_name,)
    member.detector.observe([ME, replace(DONOR, counter=1, wanted=wanted)], 1_000)
    member.plan(3 * ASK_AGAIN_MS + 1)
    assert not member.table.asked


def asked_for(number, requester="me#1", **donor):
    """The donor's view: it was asked for one of its leases."""
    row = replace(DONOR, wanted=(HandOffRequest(KEYS[number], requester).short_name,), **donor)
    return Member([ME, row], [lease(0, "donor#1"), lease(1, "donor#1")], "donor#1")


def test_a_fair_request_is_drained_for():
    donor = asked_for(1)
    assert donor.plan() == [Drain(HandOffRequest(KEYS[1], "me#1"))]
    assert donor.table.held[KEYS[1]].state == "draining"
    assert donor.plan(1) == []


def test_a_drained_lease_is_given_again_and_again_until_there_is_an_answer():
    donor = asked_for(1)
    donor.plan()
    gift = donor.table.transfer(KEYS[1], donor.table.held[KEYS[1]].row)
    assert donor.plan(1) == [Write(gift, 5)]
    assert donor.plan(2) == [Write(gift, 5)]


def test_a_request_that_is_not_fair_in_the_donors_own_plan_is_void():
    for donor in (asked_for(0), asked_for(2), asked_for(1, "stranger#1")):
        assert donor.plan() == []
        assert len(donor.table.answered) == 1
        assert donor.plan(1) == []


def test_a_request_for_a_stopped_or_paused_shard_is_void():
    row = replace(DONOR, wanted=(HandOffRequest(KEYS[1], "me#1").short_name,))
    donor = Member([ME, row], [lease(0, "donor#1"), lease(1, "donor#1", paused=True)], "donor#1")
    assert donor.plan() == []
    assert donor.table.answered


def test_a_request_of_a_member_that_died_is_void():
    donor = Member(
        [replace(ME, state="sealed"), replace(DONOR, wanted=(HandOffRequest(KEYS[1], "me#1").short_name,))],
        [lease(0, "donor#1"), lease(1, "donor#1")],
        "donor#1",
    )
    assert donor.plan() == []
    assert donor.table.answered


def test_a_request_that_was_refused_and_is_made_again_is_looked_at_again():
    donor = asked_for(1)
    request = HandOffRequest(KEYS[1], "me#1")
    donor.table.answered[request.short_name] = None
    assert donor.plan() == []
    donor.detector.observe([ME, replace(DONOR, counter=1)], 1_000)
    donor.plan(1_000)
    donor.detector.observe([ME, replace(DONOR, counter=2, wanted=(request.short_name,))], 2_000)
    assert donor.plan(2_000) == [Drain(request)]


def test_a_lease_that_was_just_given_stays_for_a_while():
    third = replace(DONOR, member_id="third#1")
    member = Member([ME, DONOR, third], [lease(0, "donor#1"), lease(1, "donor#1")])
    moved_ms = SETTLING_MS + 1
    member.table.moved[KEYS[0]] = member.table.moved[KEYS[1]] = (moved_ms, "third#1")
    member.hear(moved_ms)
    assert member.plan(moved_ms) == []
    member.hear(moved_ms + MOVE_COOL_DOWN_MS)
    assert member.plan(moved_ms + MOVE_COOL_DOWN_MS) == [RequestHandOff("donor#1", HandOffRequest(KEYS[1], "me#1"))]


def test_a_lease_that_did_not_drain_stays_for_a_while_without_another_try():
    donor = asked_for(1)
    request = HandOffRequest(KEYS[1], "me#1")
    donor.plan()
    donor.table.keep(KEYS[1], 30_000)
    for counter, now_ms in enumerate((30_000, 60_000, 29_999 + MOVE_COOL_DOWN_MS), 1):
        donor.detector.observe([ME, replace(DONOR, counter=counter)], now_ms)
        donor.plan(now_ms)
        donor.detector.observe([ME, replace(DONOR, counter=counter, wanted=(request.short_name,))], now_ms)
        assert donor.plan(now_ms) == []
    later_ms = 30_000 + MOVE_COOL_DOWN_MS
    donor.detector.observe([ME, replace(DONOR, counter=8)], later_ms)
    donor.plan(later_ms)
    donor.detector.observe([ME, replace(DONOR, counter=8, wanted=(request.short_name,))], later_ms)
    assert donor.plan(later_ms) == [Drain(request)]


def test_a_lease_that_was_given_to_a_joiner_may_go_on_to_the_next_one():
    third = replace(DONOR, member_id="third#1")
    donor = Member([DONOR, third], [lease(0, "donor#1"), lease(1, "donor#1"), lease(2, "third#1")], "donor#1")
    donor.table.moved[KEYS[0]] = donor.table.moved[KEYS[1]] = (SETTLING_MS + 1, "third#1")
    request = HandOffRequest(KEYS[1], "me#1")
    donor.detector.observe([ME, third, replace(DONOR, wanted=(request.short_name,))], SETTLING_MS)
    assert donor.plan(SETTLING_MS + 2) == [Drain(request)]


def test_a_lease_that_was_taken_from_the_dead_may_move_at_once():
    member = Member([ME, DONOR], [lease(0, "donor#1"), lease(1, "donor#1")])
    member.table.moved[KEYS[1]] = (0, "dead#1")
    assert member.plan() == [RequestHandOff("donor#1", HandOffRequest(KEYS[1], "me#1"))]


def test_members_that_drain_or_cannot_read_get_nothing_while_others_can():
    for flaw in ({"draining": True}, {"reads_healthy": False}):
        assert Member([replace(ME, **flaw), DONOR], [lease(0)]).plan() == []
    assert Member([replace(ME, reads_healthy=False)], [lease(0)]).plan() == [take(KEYS[0], None, 5)]


def test_leases_of_a_draining_member_are_asked_for():
    member = Member([ME, replace(DONOR, draining=True)], [lease(0, "donor#1")])
    assert member.plan() == [RequestHandOff("donor#1", HandOffRequest(KEYS[0], "me#1"))]


def test_a_shard_is_not_taken_before_its_parents_are_finished():
    child = replace(lease(2), waits_for=(KEYS[0].shard_id, KEYS[1].shard_id))
    held = [lease(0, "me#1"), lease(1, "me#1")]
    assert Member([ME], [*held, child]).plan() == []
    done = [replace(row, finish=Finish("end")) for row in held]
    assert Member([ME], [*done, child]).plan() == [take(KEYS[2], None, 5)]


def test_a_blocked_shard_that_is_held_weighs_nothing():
    child = replace(lease(2, "me#1"), waits_for=(KEYS[0].shard_id,))
    member = Member([ME, DONOR], [lease(0, "donor#1"), lease(1), child])
    assert member.plan() == [take(KEYS[1], None, 5)]


def test_nothing_is_planned_again_while_nothing_changes():
    member = Member([ME], [lease(0)])
    assert member.plan()
    assert member.plan(1_000) == []
    member.table.changed = True
    assert member.plan(1_001)


def test_rows_of_members_long_over_are_deleted_unless_a_lease_names_them():
    over = [replace(DONOR, state="left"), replace(DONOR, member_id="b#1", state="sealed")]
    member = Member([ME, *over], [lease(0, "b#1", paused=True)])
    steps = member.plan(MEMBER_KEPT_MS)
    assert [step for step in steps if isinstance(step, DeleteMember)] == [DeleteMember("donor#1")]


def test_a_lease_without_room_is_known_since_it_was_first_planned():
    full, other = replace(ME, shards_max=1), replace(DONOR, shards_max=1)
    child = lease(3, waits_for=(KEYS[0].shard_id,))
    member = Member([full, other], [lease(0, "me#1"), lease(1, "donor#1"), lease(2), child])
    member.plan(1_000)
    assert member.table.unplaced == {KEYS[2]: 1_000}
    member.plan(1_000 + ASK_AGAIN_MS)
    assert member.table.unplaced == {KEYS[2]: 1_000}
    member.detector.observe([full, other, replace(ME, member_id="third#1")], 20_000)
    member.table.changed = True
    member.plan(20_000)
    assert not member.table.unplaced


def test_what_could_not_be_read_here_is_not_asked_for_again_for_a_while_but_taken_when_it_is_free():
    member = Member([ME, DONOR], [lease(0, "donor#1"), lease(1, "donor#1")])
    member.table.not_wanted_until = {KEYS[0]: 300_000, KEYS[1]: 300_000}
    assert member.plan() == []
    member.hear(300_000)
    assert [type(step) for step in member.plan(300_000)] == [RequestHandOff]
    free = Member([ME, DONOR], [lease(0)])
    free.table.not_wanted_until = {KEYS[0]: 300_000}
    other = Member([ME, DONOR], [lease(0)], "donor#1")
    assert [step.key for step in free.plan() + other.plan()] == [KEYS[0]]


def test_a_donor_is_asked_for_at_most_eight_leases_at_a_time():
    keys = [replace(KEYS[0], shard_id=f"shardId-{number:012}") for number in range(40)]
    leases = [LeaseRow(key=key, owner="donor#1", version=5) for key in keys]
    member = Member([ME, DONOR], leases)
    first = [step.request.key for step in member.plan() if isinstance(step, RequestHandOff)]
    assert len(first) == 8
    assert list(member.table.asked) == first
    busy = replace(DONOR, wanted=tuple(HandOffRequest(key, "other#1").short_name for key in keys[:7]))
    member = Member([ME, busy], leases)
    assert sum(isinstance(step, RequestHandOff) for step in member.plan()) == 1


def test_a_donor_gives_any_lease_that_its_plan_gives_away_if_the_requester_gets_as_many():
    keys = [replace(KEYS[0], shard_id=f"shardId-{number:012d}") for number in range(9)]
    rows = [LeaseRow(key=key, owner=DONOR.member_id, version=1) for key in keys]
    third = replace(ME, member_id="third#1")

    def drained(*requests):
        row = replace(DONOR, wanted=tuple(request.short_name for request in requests))
        donor = Member([ME, third, row], rows, DONOR.member_id)
        return [step.request for step in donor.plan() if isinstance(step, Drain)]

    planned = {
        request.key: request.requester
        for request in (HandOffRequest(key, member.member_id) for key in keys for member in (ME, third))
        if drained(request) == [request]
    }
    for_me = [HandOffRequest(key, ME.member_id) for key in planned]
    assert len(for_me) == 6, "each of the other two gets three, whichever they are"
    assert drained(*for_me) == for_me[:3]
    both = [HandOffRequest(for_me[0].key, member.member_id) for member in (ME, third)]
    assert drained(*both) == both[:1]


def test_a_round_takes_at_most_a_hundred_leases_and_the_next_one_goes_on():
    keys = [replace(KEYS[0], shard_id=f"shardId-{number:012d}") for number in range(TAKES_MAX + 1)]
    member = Member([ME], [LeaseRow(key=key) for key in keys])
    assert len(member.plan()) == TAKES_MAX
    assert member.table.changed
