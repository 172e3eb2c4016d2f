"""Metrics of consumers and producers: a plain read, and exporters for OpenTelemetry, Prometheus and CloudWatch.

    from anabranch.metrics import CloudWatch, Prometheus

    consumer = anabranch.Consumer("orders", app="billing", metrics=[Prometheus(), CloudWatch(level="detailed")])

Importing this needs none of the optional packages; creating an exporter does.
"""

from anabranch.metrics.catalogue import Level, Measurement, Metric, Summary
from anabranch.metrics.cloudwatch import CloudWatch, EmbeddedMetrics
from anabranch.metrics.opentelemetry import OpenTelemetry
from anabranch.metrics.prometheus import Prometheus
from anabranch.metrics.sources import Exporter, Source

__all__ = [
    "CloudWatch",
    "EmbeddedMetrics",
    "Exporter",
    "Level",
    "Measurement",
    "Metric",
    "OpenTelemetry",
    "Prometheus",
    "Source",
    "Summary",
]
