"""The lease machine: what follows at once, what waits for the next look at the store, and what an answer proves."""

from functools import partial

import pytest
from msgspec.structs import replace

from anabranch._core.leases.machine import Ended, Joined, Lost, ReportChanged
from anabranch._core.leases.plan import Drain, Write
from anabranch._core.leases.store_calls import (
    Answer,
    CreateLease,
    Description,
    ListShards,
    NoAnswer,
    PollStore,
    ReadApp,
    ReadLease,
    ReadLeases,
    RegisterMember,
    TakeLease,
)
from anabranch._core.leases.timing import lease_timing
from anabranch._model.hash_keys import HashKeyRange
from anabranch._model.leases import (
    AppRow,
    Finish,
    HandOffRequest,
    HeartbeatWrite,
    LeaseKey,
    LeaseRow,
    MemberRow,
    ShardStatus,
)
from anabranch._model.streams import Shard
from anabranch.errors import FleetMismatchError, LeaseStoreError, LeaseStoreInvalidError
from anabranch.events import (
    MemberDiffers,
    MemberEnded,
    MemberEvicted,
    MemberJoined,
    ShardRecovered,
    ShardStalled,
    StoreReset,
    StoreRolledBack,
    StoreUnanswered,
)
from anabranch.limits import HASH_KEY_MAX
from anabranch.reasons import ReadsThrottled, WorkersFull
from anabranch.stores import Changed, Found, MemoryLeaseStore
from lease_machine_driver import APP, STREAM, Driver, now
from memory_rows import StoreThatFailsOverIn, forget, forget_last_lease, replace_rows, set_app, stored

DEAD = MemberRow(member_id="dead#1", expiry_ms=10_000)
KEY = LeaseKey("1:orders:1", 0, "shardId-000000000000")


def create(store, row=None):
    now(store.open(APP))
    now(store.create_lease(row or LeaseRow(key=KEY)))


def holder(store=None):
    """A member that holds the lease."""
    store = store or MemoryLeaseStore()
    create(store)
    driver = Driver(store).join()
    driver.round()
    assert [holding.row.key for holding in driver.held] == [KEY]
    return driver


def ended(driver):
    """The store has sealed this member, and its heartbeat says so."""
    machine = driver.machine
    now(driver.store.seal_member(machine.member_id, machine.heartbeat.status.row.counter))
    driver.beat()
    assert machine.ending == "sealed"


# taking


class StoreThatKnowsTheDead(MemoryLeaseStore):
    """As one whose processes run on one machine, where the kernel tells."""

    async def poll(self):
        return replace(await super().poll(), known_dead=(DEAD.member_id,))


def test_the_shards_of_a_dead_process_are_taken_in_the_moment_of_its_seal():
    store = StoreThatKnowsTheDead()
    create(store)
    now(store.register_member(DEAD))
    now(store.take_lease(KEY, DEAD.member_id, expected_owner=None, expected_version=0))
    driver = Driver(store).join()
    steps = driver.begin(driver.machine.run)
    action = next(steps)
    while not getattr(action, "wakeable", False):
        action = steps.send(driver.perform(action))
        driver.changes += driver.machine.take_changes()
    assert driver.events(MemberEvicted) == [MemberEvicted(member_id=DEAD.member_id)]
    assert [holding.row.key for holding in driver.held] == [KEY], "before the first wait"


def test_a_lease_whose_owner_has_no_row_is_taken_after_an_expiry():
    store = MemoryLeaseStore()
    driver = Driver(store).join()
    now(store.create_lease(LeaseRow(key=KEY, owner="gone#1")))
    while not driver.held:
        driver.beat()
        driver.round()
        driver.now_ms += 1_000
    assert driver.machine.timing.expiry_ms <= driver.now_ms <= driver.machine.timing.expiry_ms + 2_000


def test_every_take_goes_above_the_epochs_that_a_store_has_forgotten():
    store = MemoryLeaseStore()
    create(store)
    driver = Driver(store).join()
    driver.machine.table.epoch_floors[KEY] = 6
    driver.round()
    assert [holding.row.epoch for holding in driver.held] == [7]


def test_the_first_take_of_a_child_goes_above_the_epochs_of_its_parents():
    store = MemoryLeaseStore()
    create(store, LeaseRow(key=KEY, epoch=4, finish=Finish("end")))
    child = replace(KEY, shard_id="child")
    create(store, LeaseRow(key=child, waits_for=(KEY.shard_id,)))
    driver = Driver(store).join()
    driver.round()
    assert [(holding.row.key, holding.row.epoch) for holding in driver.held] == [(child, 5)]


def test_a_parent_that_is_open_in_the_store_keeps_a_planned_take_from_being_sent():
    store = MemoryLeaseStore()
    child = replace(KEY, shard_id="child")
    create(store, LeaseRow(key=child, waits_for=(KEY.shard_id,)))
    driver = Driver(store).join()
    steps = driver.begin(driver.machine.round)
    action = next(steps)
    while action != ReadLease(KEY):
        action = steps.send(driver.perform(action))
    create(store)  # the parent's row came, after this member had read all leases
    while not isinstance(action, RegisterMember | TakeLease):
        try:
            action = steps.send(driver.perform(action))
        except StopIteration:
            break
    assert not isinstance(action, TakeLease)
    assert driver.machine.table.changed, "the next round looks again"


def test_the_worker_that_finishes_the_last_parent_takes_its_child_at_once():
    store = MemoryLeaseStore()
    driver = holder(store)
    child = replace(KEY, shard_id="child")
    create(store, LeaseRow(key=child, waits_for=(KEY.shard_id,)))
    driver.do(driver.machine.adopt, KEY, ["child"])
    assert len(driver.held) == 1, "its parent is open"
    row = driver.held[0].row
    assert (
        driver.do(driver.machine.write, Write(replace(row, owner=None, finish=Finish("end")), row.version)) == "written"
    )
    assert driver.lost == ["finished"]
    driver.do(driver.machine.adopt, KEY, ["child"])
    assert [holding.row.key for holding in driver.held] == [KEY, child]
    assert driver.held[1].row.epoch == 2


@pytest.mark.parametrize("what", ["fence", "draining", "life"])
def test_a_planned_take_is_not_sent_if_meanwhile_its_member(what):
    store = MemoryLeaseStore()
    create(store, LeaseRow(key=KEY, waits_for=("gone",)))
    driver = Driver(store).join()
    machine = driver.machine
    steps = driver.begin(machine.round)
    action = next(steps)
    while not isinstance(action, ReadLease):
        action = steps.send(driver.perform(action))
    if what == "fence":
        driver.now_ms += lease_timing().fence_ms
    elif what == "draining":
        machine.drain()
    else:
        ended(driver)
    with pytest.raises(StopIteration):  # noqa: PT012 -- all steps that are left
        while not isinstance(action, TakeLease):
            action = steps.send(driver.perform(action))
    assert now(store.read_lease(KEY)).owner is None


def test_a_row_that_was_read_outside_of_a_round_and_names_this_member_is_worked_on_at_once():
    driver = Driver(MemoryLeaseStore()).join()
    machine = driver.machine
    machine.observe_lease(LeaseRow(key=KEY, owner=machine.member_id, version=1))
    driver.changes += machine.take_changes()
    assert [holding.row.key for holding in driver.held] == [KEY]


def test_a_shard_that_no_worker_may_own_is_reported_once_and_so_is_its_end():
    store = MemoryLeaseStore()
    for number in range(2):
        create(store, LeaseRow(key=replace(KEY, shard_id=f"shardId-{number:012}")))
    driver = Driver(store, shards_max=1).join()
    for _ in range(8):
        driver.round()
        driver.now_ms += 5_000
        driver.beat()
    assert len(driver.held) == 1
    (told,) = driver.events(ShardStalled)
    assert (told.stream, told.shard_id) == ("orders", "shardId-000000000001")
    assert told.reason == WorkersFull()
    assert driver.events(ShardRecovered) == []
    other = Driver(store, worker_id="other")
    other.now_ms = driver.now_ms
    other.join().round()
    assert [holding.row.key.shard_id for holding in other.held] == ["shardId-000000000001"]
    driver.round()
    (over,) = driver.events(ShardRecovered)
    assert (over.stream, over.shard_id, over.reason) == ("orders", "shardId-000000000001", WorkersFull())
    assert 30 < over.seconds < 60
    driver.round()
    assert len(driver.events(ShardStalled) + driver.events(ShardRecovered)) == 2


# writing and giving


def test_an_answer_that_comes_after_the_lease_was_lost_and_taken_again_leaves_the_new_holding_alone():
    driver = holder()
    machine, store, before = driver.machine, driver.store, driver.held[0]
    commit = driver.begin(machine.write, Write(before.row, before.row.version))
    answer = driver.perform(next(commit))  # it takes effect, and its answer is late
    member_id = machine.member_id
    ended(driver)
    driver.round()
    assert [holding.row.owner for holding in driver.held] == [member_id, machine.member_id]
    with pytest.raises(StopIteration) as outcome:
        commit.send(answer)
    assert outcome.value.value == "lost"
    assert machine.table.held[KEY] is driver.held[1]
    assert machine.ending is None
    assert now(store.read_lease(KEY)).owner == machine.member_id


@pytest.mark.parametrize("is_lost", [False, True])
def test_a_hand_off_is_not_asked_for_if_the_lease_was_lost_since_the_plan(is_lost):
    driver = holder()
    table, request = driver.machine.table, HandOffRequest(KEY, "b#1")
    table.drain(request)
    if is_lost:
        table.drop(KEY)
    assert list(driver.machine._perform(Drain(request))) == []
    assert [type(change) for change in driver.machine.take_changes()] == ([] if is_lost else [Drain])


class StoreThatAcceptsNoWrite(MemoryLeaseStore):
    async def write_lease(self, row, *, member_id, expected_version):
        raise LeaseStoreError("away")


def test_a_gift_that_got_no_answer_before_its_giver_was_sealed_is_a_loss():
    driver = holder(StoreThatAcceptsNoWrite())
    driver.machine.table.drain(HandOffRequest(KEY, "b#1"))
    assert driver.do(driver.machine.transfer, KEY, driver.held[-1].row) == "unknown"
    ended(driver)
    driver.round()
    assert driver.lost == ["member_ended"]


def test_a_gift_without_an_answer_is_repeated_in_each_round_and_nothing_is_started_meanwhile():
    driver = holder(StoreThatAcceptsNoWrite())
    machine = driver.machine
    machine.table.drain(HandOffRequest(KEY, "b#1"))
    driver.do(machine.transfer, KEY, driver.held[-1].row)
    assert machine.table.held[KEY].state == "transferring"
    driver.store.__class__ = MemoryLeaseStore
    driver.round()
    assert driver.lost == ["given"]
    assert now(driver.store.read_lease(KEY)).owner == "b#1"


def test_a_forked_child_is_no_member_and_writes_nothing():
    driver = holder()
    row = driver.held[0].row
    driver.machine.end("forked")
    assert not driver.machine.may_take()
    assert not driver.machine.may_start(*driver.moment)
    steps = driver.begin(driver.machine.write, Write(row, row.version))
    with pytest.raises(StopIteration) as outcome:
        next(steps)
    assert outcome.value.value == "lost"


def test_a_held_lease_whose_row_went_back_fences_everything_in_the_same_step():
    driver = holder()
    row = driver.held[0].row
    replace_rows(driver.store, LeaseRow, lambda row: replace(row, version=0, owner="other#1"))
    assert driver.do(driver.machine.write, Write(row, row.version)) == "lost"
    assert driver.machine.ending == "rolled_back"
    assert not driver.machine.may_start(*driver.moment)


@pytest.mark.parametrize("owner, reason", [("other#1", "taken_over"), (None, "row_changed")])
def test_a_lease_that_the_row_no_longer_gives_to_this_member_is_lost_with_the_reason_and_its_owner(owner, reason):
    driver = holder()
    replace_rows(driver.store, LeaseRow, lambda row: replace(row, version=row.version + 1, owner=owner))
    row = driver.held[0].row
    assert driver.do(driver.machine.write, Write(row, row.version)) == "lost"
    assert [change for change in driver.changes if isinstance(change, Lost)] == [Lost(KEY, reason, owner)]


def test_a_call_that_is_cancelled_counts_as_one_without_an_answer():
    store = MemoryLeaseStore()
    create(store)
    driver = Driver(store).join()
    driver.round()
    assert driver.machine.may_take()
    steps = driver.begin(driver.machine.ask, PollStore())
    next(steps)
    steps.close()
    assert not driver.machine.may_take(), "until the storage is confirmed"


# a new member


def test_a_member_that_was_sealed_continues_as_a_new_one():
    driver = holder()
    before = driver.machine.member_id
    ended(driver)
    assert not driver.machine.may_start(*driver.moment)
    driver.round()
    assert driver.lost == ["member_ended"]
    assert driver.events(MemberEnded) == [MemberEnded(member_id=before, reason="evicted")]
    assert driver.machine.member_id != before
    assert driver.events(MemberJoined) == [MemberJoined(member_id=driver.machine.member_id)]
    assert [type(change) for change in driver.changes if isinstance(change, Joined | Ended)] == [Joined, Ended, Joined]
    assert len(driver.held) == 2, "it takes what its predecessor held"


class StoreThatIsAway(MemoryLeaseStore):
    is_away = True

    async def register_member(self, row):
        if self.is_away:
            raise LeaseStoreError("the disk is full")
        return await super().register_member(row)


def test_a_registration_is_repeated_until_the_store_answers_and_counts_from_its_first_try():
    store = StoreThatIsAway()
    driver = Driver(store)
    steps = driver.begin(driver.machine.join, (STREAM.stream_key,))
    action = next(steps)
    for _ in range(20):
        action = steps.send(driver.perform(action))
        driver.changes += driver.machine.take_changes()
    assert [event.failure_count for event in driver.events(StoreUnanswered)] == [2, 4]
    store.is_away = False
    with pytest.raises(StopIteration):  # noqa: PT012 -- all steps that are left
        while True:
            action = steps.send(driver.perform(action))
    assert driver.machine.heartbeat.status.fence.valid_until_ms == lease_timing().fence_ms


def test_a_report_that_others_wait_for_is_sent_at_once():
    driver = holder()
    assert any(isinstance(change, ReportChanged) for change in driver.changes)
    driver.changes.clear()
    driver.round()
    assert not driver.changes
    assert driver.machine.heartbeat.report.load == 1


# settings


def _meet_a_stranger(joined_wall_ms):
    """A member with other settings that works beside this one, as after a store was rolled back."""
    store = MemoryLeaseStore()
    driver = Driver(store).join()
    stranger = MemberRow(member_id="b#1", expiry_ms=10_000, order="key", joined_wall_ms=joined_wall_ms)
    now(store.register_member(stranger))
    for attempt in (1, 2):
        driver.round()
        now(store.heartbeat(HeartbeatWrite(member_id="b#1", attempt=attempt)))
    driver.round()
    return driver


def test_a_member_that_came_before_one_with_other_settings_says_so_once_and_stays():
    strangers = _meet_a_stranger(10**15).events(MemberDiffers)
    assert [(event.member_id, event.settings) for event in strangers] == [("b#1", "order key; protocol 1.0")]


def test_a_member_that_came_after_one_with_other_settings_ends():
    with pytest.raises(FleetMismatchError, match=r"differs from worker 'b' .*order key"):
        _meet_a_stranger(-1)


EARLIER = MemberRow(member_id="pod-0#1", expiry_ms=10_000, order="shard", counter=7)
LEFT = replace(EARLIER, member_id="pod-0#0", state="left")
NEIGHBOUR = replace(EARLIER, member_id="pod-1#1", order="key")


def states(store):
    return {row.member_id: row.state for row in stored(store, MemberRow)}


def _check_fleet(store, *, is_exclusive):
    driver = Driver(store, worker_id="pod-0", order="key", is_exclusive=is_exclusive)
    for row in (EARLIER, LEFT, NEIGHBOUR):
        now(store.register_member(row))
    driver.do(driver.machine.check_fleet)
    return driver


def test_the_earlier_member_of_an_exclusive_worker_id_is_sealed_at_once_and_blocks_no_worker():
    store = MemoryLeaseStore()
    driver = _check_fleet(store, is_exclusive=True)
    assert driver.changes == [MemberEvicted(member_id="pod-0#1")]
    assert states(store) == {"pod-0#0": "left", "pod-0#1": "sealed", "pod-1#1": "live"}
    assert driver.now_ms == 0


def test_an_earlier_member_of_a_worker_id_that_others_may_have_is_waited_for():
    store = MemoryLeaseStore()
    driver = _check_fleet(store, is_exclusive=False)
    assert states(store)["pod-0#1"] == "sealed"
    assert driver.now_ms >= EARLIER.expiry_ms


class LateHeartbeats(MemoryLeaseStore):
    """A heartbeat that was on its way arrives between the look and the seal."""

    def __init__(self, count):
        super().__init__()
        self._left = count

    async def seal_member(self, member_id, observed_counter):
        if self._left:
            self._left -= 1
            await self.heartbeat(HeartbeatWrite(member_id=member_id, attempt=observed_counter + 1))
        return await super().seal_member(member_id, observed_counter)


@pytest.mark.parametrize("late, state", [(1, "sealed"), (3, "live")])
def test_a_late_heartbeat_delays_the_seal_and_a_member_that_continues_is_left_to_its_expiry(late, state):
    store = LateHeartbeats(late)
    driver = Driver(store, worker_id="pod-0", order="shard", is_exclusive=True)
    now(store.register_member(EARLIER))
    driver.do(driver.machine.check_fleet)
    assert states(store) == {"pod-0#1": state}
    assert bool(driver.changes) == (state == "sealed")


# the storage and the application in it


def make_lease(driver, member_id=None):
    """By a plan of this moment, unless another member is named."""
    return driver.do(driver.machine.create_lease, LeaseRow(key=KEY), member_id or driver.machine.member_id)


class StoreThatIsEmptiedAfterALook(MemoryLeaseStore):
    is_due = False

    async def read_app(self):
        row = await super().read_app()
        if self.is_due:
            set_app(self, replace(row, app_id="2"))
        return row


def test_a_lease_that_is_made_after_the_store_was_begun_again_does_not_show_there():
    store = StoreThatIsEmptiedAfterALook()
    driver = Driver(store).join()
    driver.round()
    store.is_due = True
    make_lease(driver)
    now(store.open(replace(APP, app_id="2")))
    assert not now(store.read_leases())


class StoreThatFailsOver(MemoryLeaseStore):
    storage = "first"

    async def identity(self):
        return self.storage


def test_a_plan_that_rests_on_rows_of_another_storage_or_of_an_earlier_member_makes_no_lease():
    store = StoreThatFailsOver()
    driver = Driver(store).join()
    driver.round()
    before = driver.machine.member_id
    store.storage = "second"
    assert make_lease(driver) is None
    assert not driver.machine.may_start(*driver.moment), "it knows, and is another member from the next round on"
    driver.round()
    assert driver.machine.member_id != before
    assert make_lease(driver, before) is None
    assert not now(store.read_leases())
    assert make_lease(driver) == LeaseRow(key=KEY)


def seconds_until_held(driver):
    """A round each second, and a heartbeat between two of them."""
    for second in range(30):
        driver.round()
        if driver.held:
            return second
        driver.now_ms += 1_000
        driver.beat()
    raise AssertionError("the lease is never taken")


@pytest.mark.parametrize("call", ["poll", "read_streams", "read_app", "read_leases"])
def test_nothing_is_taken_in_the_round_in_which_a_failed_call_may_have_been_a_fail_over(call):
    """The owner may be unaware of it, and its lease be forgotten by the storage that the next calls reach."""
    store = StoreThatFailsOverIn(call)
    driver = Driver(store).join()
    create(store)
    store.is_due = True
    assert seconds_until_held(driver) >= 10
    assert driver.events(StoreRolledBack)


def test_a_heartbeat_that_failed_is_followed_by_a_look_at_the_storage():
    store = StoreThatFailsOverIn("heartbeat")
    driver = Driver(store).join()
    store.is_due = True
    driver.beat()
    assert driver.machine.ending is None
    driver.now_ms += lease_timing().call_deadline_ms
    driver.beat()
    assert driver.machine.ending == "rolled_back"


def test_nothing_is_taken_at_once_where_the_application_does_not_name_its_storage():
    store = MemoryLeaseStore()
    create(store)
    set_app(store, APP)
    driver = Driver(store).join()
    assert seconds_until_held(driver) == 10
    assert now(store.read_app()).incarnation == now(store.identity())


class StoreThatDoesNotSay(MemoryLeaseStore):
    """Whose it is, from some time on."""

    is_silent = False

    async def read_app(self):
        if self.is_silent:
            raise LeaseStoreError("away")
        return await super().read_app()


def test_no_lease_is_made_in_a_store_that_does_not_say_whose_it_is():
    store = StoreThatDoesNotSay()
    driver = Driver(store).join()
    driver.round()
    store.is_silent = True
    assert make_lease(driver) is None
    assert not now(store.read_leases())


def test_no_lease_is_made_by_a_member_that_was_paused_beyond_its_fence():
    """What it had planned before may have been made, finished and cleaned up by others since."""
    driver = Driver(MemoryLeaseStore()).join()
    driver.round()
    driver.now_ms += lease_timing().fence_ms + 1
    assert make_lease(driver) is None
    assert not now(driver.store.read_leases())


@pytest.mark.parametrize("app", [None, AppRow(app="billing", app_id="2", created_wall_ms=1)])
def test_no_lease_is_made_in_a_store_that_was_emptied_or_begun_again_by_another(app):
    store = MemoryLeaseStore()
    driver = Driver(store).join()
    driver.round()
    assert make_lease(driver) == LeaseRow(key=KEY)
    forget(store, LeaseRow)
    set_app(store, app)
    with pytest.raises(LeaseStoreInvalidError, match="Nothing was created in its place"):
        make_lease(driver)
    assert not now(store.read_leases())
    assert driver.events(StoreReset)


# evidence of the storage in each answer


class CountedIdentity(MemoryLeaseStore):
    """Its answers say which storage they came from, so nobody has to ask."""

    asked = 0
    storage = "first"

    async def identity(self):
        self.asked += 1
        return self.storage

    async def get(self, keys):
        return Found(self.rows.get(keys), self.storage)

    async def scan(self, scopes):
        return Found(self.rows.scan(scopes), self.storage)

    async def change(self, keys, update):
        return Changed(*self.rows.change(keys, update), self.storage)


def test_a_round_and_a_heartbeat_ask_for_no_identity_where_answers_carry_it():
    driver = holder(CountedIdentity())
    asked = driver.store.asked
    for _ in range(5):
        driver.now_ms += 1_000
        driver.round()
        driver.beat()
    assert driver.store.asked == asked


@pytest.mark.parametrize("operation", ["round", "beat"])
def test_an_answer_of_another_storage_fences_everything_in_the_same_step(operation):
    driver = holder(CountedIdentity())
    driver.store.storage = "second"
    if operation == "round":
        steps = driver.begin(driver.machine.round)
        steps.send(driver.perform(next(steps)))
    else:
        driver.beat()
    assert driver.machine.ending == "rolled_back"
    assert not driver.machine.may_start(*driver.moment)


class StoreWithoutEvidence(MemoryLeaseStore):
    """As a server that says who it is only when it is asked."""

    async def scan(self, scopes):
        return (await super().scan(scopes))._replace(evidence=None)

    async def change(self, keys, update):
        return (await super().change(keys, update))._replace(evidence=None)


def after_heartbeats():
    driver = holder(StoreWithoutEvidence())
    for _ in range(3):
        driver.now_ms += 2_500
        driver.beat()
    driver.round()
    assert driver.machine.ending is None
    return driver


def test_a_counter_lower_than_the_acknowledged_one_shows_a_roll_back_to_the_next_heartbeat():
    driver = after_heartbeats()
    replace_rows(driver.store, MemberRow, lambda row: replace(row, counter=1))
    driver.now_ms += 2_500
    driver.beat()
    assert driver.machine.ending == "rolled_back"


def test_a_counter_lower_than_the_acknowledged_one_shows_a_roll_back_to_a_poll():
    driver = after_heartbeats()
    before = driver.machine.member_id
    replace_rows(driver.store, MemberRow, lambda row: replace(row, counter=1))
    driver.round()
    assert driver.machine.ending == "rolled_back"
    driver.round()
    assert driver.machine.member_id != before
    assert driver.events(StoreRolledBack)


def test_a_held_lease_older_than_the_acknowledged_one_shows_a_roll_back():
    driver = after_heartbeats()
    replace_rows(driver.store, LeaseRow, lambda row: replace(row, version=0))
    driver.machine.table.read_again()
    driver.round()
    assert driver.machine.ending == "rolled_back"


@pytest.mark.parametrize("app", [None, AppRow(app="billing", app_id="2", created_wall_ms=1)])
def test_the_next_poll_shows_that_the_application_is_gone(app):
    driver = holder()
    set_app(driver.store, app)
    driver.now_ms += 1_000
    with pytest.raises(LeaseStoreInvalidError, match="Nothing was created in its place"):
        driver.round()


# status


def test_a_member_writes_its_status_in_the_round_that_sees_a_viewer():
    driver = holder()
    driver.round()
    assert now(driver.store.read_statuses()) == []
    now(driver.store.renew_watch())
    driver.round()
    (row,) = now(driver.store.read_statuses())
    assert row.member_id == driver.machine.member_id


def test_a_new_reason_is_written_without_a_viewer_and_leaves_the_heartbeat_as_it_is():
    driver = holder()
    stalled = ShardStatus(KEY.short_name, ReadsThrottled(error="x", failure_count=1), 5, 0.0)
    driver.described = Description(shards=(stalled,))
    before = driver.machine.heartbeat.report
    driver.round()
    (row,) = now(driver.store.read_statuses())
    assert row.shards == (stalled,)
    assert driver.machine.heartbeat.report == before


def test_a_status_that_the_store_does_not_answer_is_written_in_a_later_round():
    class StoreWithoutStatuses(MemoryLeaseStore):
        async def write_status(self, row):
            raise LeaseStoreError("away")

    driver = holder(StoreWithoutStatuses())
    driver.round()
    now(driver.store.renew_watch())
    driver.round()
    assert driver.machine.ending is None
    assert driver.machine.trouble == NoAnswer("away")
    driver.store.write_status = partial(MemoryLeaseStore.write_status, driver.store)
    driver.round()
    (row,) = now(driver.store.read_statuses())
    assert row.revision == 2


def test_workers_that_begin_a_stream_together_share_the_creation_of_its_leases():
    """Ten of them take turns, call by call."""
    store, count = MemoryLeaseStore(), 1_000
    edges = [(HASH_KEY_MAX + 1) * number // count for number in range(count + 1)]
    listing = [
        Shard(
            shard_id=f"shardId-{number:012d}",
            hash_key_range=HashKeyRange(edges[number], edges[number + 1] - 1),
            starting_sequence_number=1,
        )
        for number in range(count)
    ]
    proposal = replace(STREAM, stream_key="1:large:1", bootstrapped=False)
    drivers = [Driver(store) for _ in range(10)]
    for number, driver in enumerate(drivers):
        driver.machine._entropy.seed(number)
    running = {driver: (driver.begin(driver.machine.begin_stream, proposal), None) for driver in drivers}
    created = 0
    while running:
        for driver, (steps, answer) in list(running.items()):
            try:
                action = steps.send(answer)
            except StopIteration:
                del running[driver]
                continue
            created += isinstance(action, CreateLease)
            is_listing = isinstance(action, ListShards)
            running[driver] = (steps, Answer(listing, driver.moment) if is_listing else driver.perform(action))
    assert len(now(store.read_leases())) == count
    assert created < 3 * count


def test_a_worker_that_was_suspended_before_it_creates_a_root_lease_checks_again_whether_the_stream_has_begun():
    store = MemoryLeaseStore()
    half = HASH_KEY_MAX // 2
    listing = [
        Shard(shard_id=name, hash_key_range=HashKeyRange(*keys), starting_sequence_number=1)
        for name, keys in (("shardId-000000000000", (0, half)), ("shardId-000000000001", (half + 1, HASH_KEY_MAX)))
    ]
    proposal = replace(STREAM, stream_key="1:large:1", bootstrapped=False)
    late, other = Driver(store), Driver(store)

    def begin(driver):
        steps, answer = driver.begin(driver.machine.begin_stream, proposal), None
        while True:
            try:
                action = steps.send(answer)
            except StopIteration:
                return
            yield action
            is_listing = isinstance(action, ListShards)
            answer = Answer(listing, driver.moment) if is_listing else driver.perform(action)

    was_suspended = False
    for action in begin(late):
        has_read_leases = any(isinstance(call, ReadLeases) for call in late.calls)
        if has_read_leases and isinstance(action, ReadApp) and not was_suspended:
            was_suspended = True
            for _ in begin(other):
                """The other worker completes the stream."""
            forget_last_lease(store)
            late.now_ms += 42_000
        assert not (was_suspended and isinstance(action, CreateLease))
    assert was_suspended
    assert [row.key.shard_id for row in now(store.read_leases())] == [listing[0].shard_id]


def test_a_row_that_is_gone_is_not_created_again_by_a_member_that_lost_the_lease_while_it_looked():
    driver = holder()
    (holding,) = driver.held
    machine, row = driver.machine, holding.row
    forget(driver.store, LeaseRow)  # the next owner finished the shard, and its row was cleaned up
    steps, answer, asked = driver.begin(machine.write, Write(row, row.version)), None, []
    with pytest.raises(StopIteration) as done:  # noqa: PT012 -- the step that ends it is any of them
        while True:
            action = steps.send(answer)
            asked.append(type(action).__name__)
            answer = driver.perform(action)
            machine.table.held.pop(KEY, None)  # it was sealed, and joins as another member
    assert done.value.value == "lost"
    assert "CreateLease" not in asked
    assert stored(driver.store, LeaseRow) == []


# large fleets


def reads_of_all(driver):
    return sum(isinstance(call, ReadLeases) for call in driver.calls)


def test_a_member_of_a_large_fleet_waits_for_its_turn_to_read_all_leases_and_plans_meanwhile():
    store = MemoryLeaseStore()
    create(store)
    driver = Driver(store, timing=replace(lease_timing(), rows_read_per_second=1, poll_interval_ms=500)).join()
    driver.round()
    assert reads_of_all(driver) == 1
    driver.machine.table.read_again()
    other = replace(KEY, shard_id="shardId-000000000001")
    now(store.create_lease(LeaseRow(key=other)))
    driver.machine.observe_lease(LeaseRow(key=other))
    driver.round()
    assert reads_of_all(driver) == 1
    assert {holding.row.key for holding in driver.held} == {KEY, other}
    driver.now_ms += 1_500
    driver.round()
    assert reads_of_all(driver) == 2
