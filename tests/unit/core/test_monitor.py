"""What a run reports about itself, once a second."""

from types import SimpleNamespace
from typing import ClassVar

import pytest
from msgspec.structs import replace

from anabranch import Alert
from anabranch._core.leases.store_calls import NoAnswer
from anabranch._core.monitor import AlertState, FleetLag, Lag, RunMonitor
from anabranch.errors import ConfigurationError
from anabranch.events import AlertCleared, AlertFired, ConsumerProgress, ShardProgress, ShardStillStopped
from anabranch.measures import Counters, TimeBuckets
from anabranch.reasons import NoLiveWorker, PausedByProgram, StoppedByPayload
from anabranch.reports import ConsumerMeasures, FleetStatus, ShardState
from fleet_samples import SHARD as FLEET_SHARD

SHARD = ShardState(
    stream="orders",
    shard_id="shardId-0",
    phase="reading",
    reason=None,
    checkpoint=None,
    counters=Counters(),
    lag=0.0,
    millis_behind_latest=0,
    retention_left=86_400.0,
    checkpoint_age=None,
    unfinished_count=0,
    held_bytes=0,
    fence_token=1,
)
MEASURES = ConsumerMeasures(
    app="billing",
    counters=Counters(),
    shards=(SHARD,),
    budget_used_bytes=0,
    budget_limit_bytes=100,
    lease_taken_count=1,
    hand_off_count=0,
    lease_lost_count=0,
    store_calls=TimeBuckets(),
    store_failure_count=0,
    store_throttle_count=0,
    loop_lags=TimeBuckets(),
)
AWAY = NoAnswer("connection refused")


def kinds(events):
    return [type(event).__name__ for event in events]


class FakeSession:
    """What the monitor reads of a session."""

    stream, shard_id = SimpleNamespace(name="orders"), "shardId-0"
    names: ClassVar = {"stream": "orders", "shard_id": "shardId-0"}

    def __init__(self, counted, *, lag=0.0, stopped=None):
        self.lag, self.stopped = lag, stopped
        self.count(counted)

    def count(self, counted):
        self.counters = self.counted = counted
        self.lane = SimpleNamespace(finished_count=counted.handled_count)

    def lag_seconds(self, service_seconds):
        return self.lag


def test_progress_is_reported_with_the_time_since_the_last_report():
    monitor = RunMonitor((), 0)
    monitor.look_at_sessions([], None, 1_000)
    counters = Counters(read_count=5, handled_count=4, handled_bytes=40)
    counters.calls.add(7)
    session = FakeSession(counters, lag=2.0)
    (told,) = monitor.look_at_sessions([session], None, 2_000)
    assert (told.read_count, told.handled_count, told.handled_bytes, told.calls.count) == (5, 4, 40, 1)
    assert (told.seconds, told.lag, str(told)) == (
        1.0, 2.0, "orders/shardId-0: 5 records read, 4 handled, 0 committed in 1.0 s, 2.0 s behind",
    )  # fmt: skip
    session.count(counters.plus(Counters(committed_count=4)))
    (told,) = monitor.look_at_sessions([session], None, 3_000)
    assert (told.read_count, told.committed_count, told.calls.count) == (0, 4, 0)
    assert monitor.look_at_sessions([session], None, 4_000) == [], "nothing flowed"
    session.count(session.counted.plus(Counters(handled_count=1)))
    (last,) = monitor.on_gone(session, 4_500)
    assert isinstance(last, ShardProgress)
    assert (last.handled_count, last.lag) == (1, None)
    (again,) = monitor.look_at_sessions([FakeSession(counters)], None, 5_000)
    assert again.read_count == 5, "a lease that was taken again counts from zero"


def test_all_shards_are_measured_only_when_needed():
    monitor = RunMonitor((), 0)
    assert next(second for second in range(1, 100) if monitor.wants_measures(1_000 * second)) == 60
    monitor.look(MEASURES, 60_000)
    assert not monitor.wants_measures(61_000)
    monitor.look_at_sessions([FakeSession(Counters(), stopped=object())], None, 61_000)
    assert monitor.wants_measures(61_000)
    monitor.look(MEASURES, 62_000)  # it is not stopped any more
    assert not monitor.wants_measures(62_000)
    assert RunMonitor((Alert(lag=5.0),), 0).wants_measures(1_000)


def test_a_progress_line_is_logged_every_minute():
    monitor, told = RunMonitor((), 0), []
    for second in range(1, 121):
        worse = replace(SHARD, shard_id="shardId-1", lag=30.0, reason=PausedByProgram(), retention_left=10.0)
        measures = replace(MEASURES, counters=Counters(handled_count=10 * second), shards=(SHARD, worse))
        found = monitor.look(measures, 1_000 * second)
        told += [event for event in found if isinstance(event, ConsumerProgress)]
    assert [event.handled_count for event in told] == [600, 600]
    first = told[0]
    assert isinstance(first, ConsumerProgress)
    assert (first.records_per_second, first.lag, first.retention_left) == (10.0, 30.0, 10.0)
    assert (first.worst_shard, first.shard_count, first.stalled_count) == ("orders/shardId-1", 2, 1)
    assert first.reason == PausedByProgram()


def test_a_stopped_shard_is_named_again_every_five_minutes():
    stopped = replace(SHARD, reason=StoppedByPayload(error="no JSON", position="7", partition_key="a"), lag=400.0)
    monitor, said = RunMonitor((), 0), []
    for second in range(1, 1_000):
        found = monitor.look(replace(MEASURES, shards=(stopped,)), 1_000 * second)
        said += [(second, event) for event in found if isinstance(event, ShardStillStopped)]
    assert [second for second, _ in said] == [301, 601, 901]
    assert str(said[0][1]) == f"orders/shardId-0: still {stopped.reason}, 400 s behind"


def test_an_unreachable_store_and_its_recovery_are_reported_once_each():
    monitor, told = RunMonitor((), 0), []
    for second in range(1, 100):
        failures = max(0, min(second, 70) - 9)
        found = monitor.look_at_store(failures, AWAY if 10 <= second < 70 else None, 1_000 * second)
        told += [(second, event) for event in found]
    assert [second for second, _ in told] == [12, 70]
    assert kinds(event for _, event in told) == ["StoreUnanswered", "StoreAnswered"]
    assert told[0][1].error == "connection refused"
    assert (told[1][1].seconds, told[1][1].failure_count) == (60.0, 61)


def test_one_call_without_an_answer_is_no_news():
    monitor = RunMonitor((), 0)
    for second in range(1, 50):
        assert monitor.look_at_store(second // 2, AWAY if second % 2 else None, 1_000 * second) == []


# alerts


def run_alert(alert, lags):
    """The events and their seconds, for one lag a second."""
    state = AlertState(alert, 0)
    told = []
    for second, lag in enumerate(lags, 1):
        seen = None if lag is None else Lag(lag, "orders", "shardId-0")
        if (event := state.observe(seen, 1_000 * second)) is not None:
            told.append((second, type(event), event.lag))
    return told


def test_an_alert_fires_after_its_periods_and_clears_after_one_good_one():
    alert = Alert(lag=5.0, for_periods=2, period=60)
    lags = [0.0] * 60 + [9.0] * 180 + [1.0] * 60
    assert run_alert(alert, lags) == [(180, AlertFired, 9.0), (300, AlertCleared, 1.0)]


def test_a_short_peak_fires_nothing():
    assert run_alert(Alert(lag=5.0), [0.0] * 60 + [99.0] * 60 + [0.0] * 300) == []


def test_the_largest_lag_of_a_period_counts():
    assert run_alert(Alert(lag=5.0, for_periods=1, period=10), [0.0] * 9 + [6.0] + [0.0] * 10) == [
        (10, AlertFired, 6.0), (20, AlertCleared, 0.0),
    ]  # fmt: skip


def test_a_period_without_a_lag_changes_nothing():
    lags = [9.0] * 60 + [None] * 120 + [9.0] * 60 + [None] * 120 + [0.0] * 60
    assert run_alert(Alert(lag=5.0), lags) == [(240, AlertFired, 9.0), (420, AlertCleared, 0.0)]


def test_an_alert_clears_when_the_shards_are_another_workers():
    monitor = RunMonitor((Alert(lag=5.0, for_periods=2, period=10),), 0)
    behind = replace(MEASURES, shards=(replace(SHARD, lag=20.0),))
    assert monitor.look_at_alerts(behind, 10_000) == []
    assert [type(event) for _, event in monitor.look_at_alerts(behind, 20_000)] == [AlertFired]
    unread = replace(MEASURES, shards=(replace(SHARD, lag=None),))
    assert monitor.look_at_alerts(unread, 30_000) == []
    ((_, cleared),) = monitor.look_at_alerts(replace(MEASURES, shards=()), 40_000)
    assert str(cleared) == "alert cleared: this worker holds no shard any more, after 20 s"
    assert monitor.look_at_alerts(replace(MEASURES, shards=()), 50_000) == []
    assert monitor.look_at_alerts(behind, 60_000) == [], "it counts its periods from the start"


def test_an_alert_names_the_worst_shard_and_why():
    state = AlertState(Alert(lag=5.0, for_periods=1, period=10), 0)
    for second in range(1, 10):
        assert state.observe(Lag(3.0, "orders", "1"), 1_000 * second) is None
    fired = state.observe(Lag(7.25, "orders", "2", PausedByProgram()), 10_000)
    assert str(fired) == f"orders/2: ALERT: 7.2 s behind, above 5 s for 10 s: {PausedByProgram()}"


def fleet(*shards):
    return FleetStatus(
        app="billing", created_seconds=0.0, streams=("orders",), members=(), shards=shards, unreported_count=0
    )


def test_the_lag_of_a_shard_without_an_owner_is_the_time_since_it_was_first_seen_so():
    lag, free = FleetLag(), replace(FLEET_SHARD, state="unowned", lag=None, reason=NoLiveWorker())
    assert lag.observe(fleet(FLEET_SHARD), 0).seconds == 1.5
    assert lag.observe(fleet(free), 1_000).seconds == 0.0
    assert lag.observe(fleet(free), 9_000).seconds == 8.0
    assert lag.observe(fleet(free), 9_000).reason == NoLiveWorker()
    assert lag.observe(fleet(FLEET_SHARD), 10_000).seconds == 1.5
    assert lag.observe(fleet(free), 11_000).seconds == 0.0, "it was handled in between"
    waiting = replace(FLEET_SHARD, state="waiting", lag=None)
    assert lag.observe(fleet(waiting, replace(FLEET_SHARD, state="finished", lag=None)), 12_000) is None


def test_several_alerts_are_judged_apart():
    monitor = RunMonitor((Alert(lag=5.0, for_periods=1, period=1), Alert(lag=50.0, for_periods=1, period=1)), 0)
    told = monitor.look_at_alerts(replace(MEASURES, shards=(replace(SHARD, lag=20.0),)), 1_000)
    assert [(alert.lag, event.limit) for alert, event in told] == [(5.0, 5.0)]
    told = monitor.look_at_alerts(replace(MEASURES, shards=(replace(SHARD, lag=60.0),)), 2_000)
    assert [alert.lag for alert, _ in told] == [50.0]
    told = monitor.look_at_alerts(replace(MEASURES, shards=(replace(SHARD, lag=1.0),)), 3_000)
    assert [type(event) for _, event in told] == [AlertCleared, AlertCleared]


@pytest.mark.parametrize(
    "given", [{"lag": 0}, {"lag": "5"}, {"lag": 5, "for_periods": 0}, {"lag": 5, "period": 0.5}, {"lag": 5, "hook": 3}]
)
def test_an_alert_that_makes_no_sense_is_refused(given):
    with pytest.raises(ConfigurationError, match=list(given)[-1]):
        Alert(**given)


def test_a_shard_whose_oldest_record_is_about_to_be_trimmed_is_reported_again_each_time_the_rest_has_halved():
    monitor, day = RunMonitor((), 0), 86_400.0

    def told(left):
        shard = replace(SHARD, lag=day - left, retention_left=left)
        events = monitor.look(replace(MEASURES, shards=(shard,)), 1_000)
        return [event for event in events if type(event).__name__ == "RetentionRunsOut"]

    assert told(day) == told(day / 4 + 1) == []
    (first,) = told(3 * 3600.0)
    assert str(first) == (
        "orders/shardId-0: data loss in 3.0 h: its oldest unfinished record is 21.0 h old; it is too slow"
    )
    assert told(2 * 3600.0) == []
    (second,) = told(1800.0)
    assert "data loss in 30 min" in str(second)
    assert told(day) == []
    assert len(told(3600.0)) == 1  # it had caught up meanwhile
