"""Figures of several consumers or producers as one, and values of a program's own metrics."""

import math

import pytest

from anabranch.measures import Counters, TimeBuckets
from anabranch.metrics.catalogue import (
    ACTIVE_SHARDS,
    ERROR_RATE,
    LAG,
    LIMITER_RATE,
    PROCESSING_LATENCY,
    RESERVED_NAMES,
    RETENTION_LEFT,
    VALUES_MAX,
    Measurement,
    Metric,
    OwnMetrics,
    Summary,
    consumer_measurements,
    merged,
)  # fmt: skip
from anabranch.metrics.cloudwatch import CloudWatch
from anabranch.metrics.prometheus import Collector, families, text_of
from anabranch.metrics.sources import Source
from anabranch.records import checked_metric
from anabranch.reports import ConsumerMeasures


@pytest.mark.parametrize("metric, together", [(ACTIVE_SHARDS, 5), (LAG, 3), (RETENTION_LEFT, 2), (LIMITER_RATE, 2)])
def test_numbers_are_added_and_of_ages_and_rates_the_worst_counts(metric, together):
    [one] = merged([Measurement(metric=metric, value=2), Measurement(metric=metric, value=3)])
    assert one.value == together


def test_histograms_are_added_and_other_labels_stay_apart():
    times = TimeBuckets()
    times.add(7)
    measured = [Measurement(metric=PROCESSING_LATENCY, value=times, labels={"app": app}) for app in ("a", "b", "a")]
    found = {one.labels["app"]: one.value.count for one in merged(measured)}
    assert found == {"a": 2, "b": 1}


def test_skipped_and_dead_lettered_records_are_no_successes_in_the_error_rate():
    counters = Counters(handled_count=10, failed_count=6, retry_count=3, skipped_count=1, dead_letter_count=2)
    measures = ConsumerMeasures(
        app="billing", counters=counters, shards=(), budget_used_bytes=0, budget_limit_bytes=1, lease_taken_count=1,
        hand_off_count=0, lease_lost_count=0, store_calls=TimeBuckets(), store_failure_count=0, store_throttle_count=0,
        loop_lags=TimeBuckets(),
    )  # fmt: skip
    (rate,) = [one.value for one in consumer_measurements(measures, {}, "summary") if one.metric is ERROR_RATE]
    assert rate == Summary(7 + 6, 6)


def test_a_summary_distinguishes_a_limited_number_of_values_and_loses_none():
    summary = Summary()
    for exponent in range(-150, 150):
        for digit in range(1, 10):
            summary.add(digit * 10.0**exponent)
    assert summary.count == sum(summary.values.values()) == 2_700
    assert len(summary.values) == VALUES_MAX


def test_negative_values_and_zero_count():
    own = OwnMetrics(lambda event: None)
    for value in (-1.25, 0.0, 3, 3):
        own.add("Balance", value)
    assert own.summaries["Balance"] == Summary(4, 4.75, {-1.2: 1, 0.0: 1, 3.0: 2})


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1.79e308, -(2.0**361), 10**400, -(10**400)])
def test_values_that_cloudwatch_does_not_take_are_refused_with_an_event(value):
    told = []
    own = OwnMetrics(told.append)
    own.add(*checked_metric("Balance", value))
    assert own.summaries == {}
    (event,) = told
    assert (event.metric, "is not a number from -2^360 to 2^360" in event.why) == ("Balance", True)


def test_the_largest_and_the_smallest_values_count():
    own = OwnMetrics(pytest.fail)
    for value in (2.0**360, -(2.0**360), 1e-300):
        own.add("Balance", value)
    assert own.summaries["Balance"].values == {2.3e108: 1, -2.3e108: 1, 0.0: 1}


@pytest.mark.parametrize("name", sorted(RESERVED_NAMES))
def test_names_that_the_embedded_metric_format_needs_are_refused(name):
    told = []
    own = OwnMetrics(told.append)
    own.add(name, 1.0)
    assert (own.summaries, [event.metric for event in told]) == ({}, [name])


def test_names_that_are_one_in_prometheus_become_one_series():
    own = OwnMetrics(pytest.fail)
    for name in ("Prediction-Confidence", "Prediction_Confidence", "PredictionConfidence"):
        own.add(name, 0.5)
    text = text_of(
        families(
            Measurement(metric=Metric(name, "summary", "None", "Own.", is_own=True), value=summary, labels={"app": "a"})
            for name, summary in own.summaries.items()
        )
    ).decode()
    samples = [line.rpartition(" ")[2] for line in text.splitlines() if "_count{" in line]
    assert samples == ["3.0"]


def failing_source(told, reads):
    def read(level):
        outcome = reads.pop(0)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    source = Source("a", read, told.append, namespace="A")
    source.read = read
    return source


def test_a_scrape_that_works_again_is_reported_too():
    told, collector = [], Collector()
    source = failing_source(told, [ValueError("a defect"), [], []])
    collector.sources[source] = "summary"
    for _ in range(3):
        list(collector.collect())
    assert [(type(event).__name__, event.exporter) for event in told] == [
        ("ExporterFailed", "Prometheus"), ("ExporterRecovered", "Prometheus"),
    ]  # fmt: skip


def test_two_exporters_of_one_class_fail_and_recover_by_themselves():
    told = []
    source = failing_source(told, [])
    first, second = CloudWatch(), CloudWatch()
    source.failed(first, OSError("throttled"))
    source.succeeded(second)
    assert [type(event).__name__ for event in told] == ["ExporterFailed"]
    source.failed(second, OSError("throttled"))
    assert told[-1].failure_count == 1
    source.succeeded(first)
    assert [type(event).__name__ for event in told] == ["ExporterFailed", "ExporterFailed", "ExporterRecovered"]
