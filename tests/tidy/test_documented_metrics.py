"""Every metric is in docs/metrics.md with its CloudWatch and Prometheus names, and no two metrics share a name."""

from pathlib import Path

from anabranch.metrics.catalogue import KNOWN_METRICS
from anabranch.metrics.opentelemetry import parts
from anabranch.metrics.prometheus import family_name

PAGE = Path(__file__).parents[2] / "docs" / "metrics.md"


def test_every_metric_is_documented_with_its_names():
    text = PAGE.read_text()
    rows = {line.split("|")[1].strip(" `"): line for line in text.splitlines() if line.startswith("| `")}
    for metric in KNOWN_METRICS:
        shown = family_name(metric, of_shard=False) + ("_total" if metric.kind == "counter" else "")
        assert f"`{shown}`" in rows[metric.name]
        assert metric.text in rows[metric.name]


def test_no_two_metrics_share_a_name():
    for of_shard in (False, True):
        families = [family_name(metric, of_shard=of_shard) for metric in KNOWN_METRICS]
        assert len(set(families)) == len(families)
        instruments = [name for metric in KNOWN_METRICS for name, _, _ in parts(metric, of_shard=of_shard)]
        assert len(set(instruments)) == len(instruments)
