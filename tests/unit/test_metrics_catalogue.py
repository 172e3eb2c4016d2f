"""Figures of several consumers or producers as one, and values of a program's own metrics."""

import pytest

from anabranch.measures import TimeBuckets
from anabranch.metrics.catalogue import (
    ACTIVE_SHARDS,
    LAG,
    LIMITER_RATE,
    PROCESSING_LATENCY,
    RETENTION_LEFT,
    VALUES_MAX,
    Measurement,
    OwnMetrics,
    Summary,
    merged,
)  # fmt: skip


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
