"""The files that the docs offer name only metrics, events and fields that exist. Real validators look at them, too."""

import configparser
import json
import re
from pathlib import Path

import msgspec
import pytest
import yaml

from anabranch import LeaseSettings, events

DOCS = Path(__file__).parents[2] / "docs"
FILES = DOCS / "files"
METRICS = re.findall(r"^\| `(\w+)` \| `(\w+)` \|", (DOCS / "metrics.md").read_text(), re.MULTILINE)
IN_CLOUDWATCH = {name for name, _ in METRICS}
IN_PROMETHEUS = {spelling for _, spelling in METRICS}


class _Loader(yaml.SafeLoader):
    """YAML with the short forms of CloudFormation, such as `!Sub`."""


_Loader.add_multi_constructor("!", lambda loader, suffix, node: loader.construct_scalar(node))


@pytest.fixture
def resources():
    return yaml.load((FILES / "cloudwatch.yaml").read_text(), _Loader)["Resources"]


def test_alarms_and_the_dashboard_show_metrics_that_exist(resources):
    named = set()
    for resource in resources.values():
        given = resource["Properties"]
        if "MetricName" in given:
            named.add(given["MetricName"])
        named |= {one["MetricStat"]["Metric"]["MetricName"] for one in given.get("Metrics", ()) if "MetricStat" in one}
        if "DashboardBody" in given:
            for widget in json.loads(given["DashboardBody"])["widgets"]:
                lines = widget["properties"].get("metrics", [])
                named |= {line[1] for line in lines if line[0] != "..."}
    assert len(named) >= 10
    assert named <= IN_CLOUDWATCH


def test_prometheus_rules_ask_for_metrics_that_exist():
    named = set(re.findall(r"\banabranch_\w+", (FILES / "prometheus-rules.yaml").read_text()))
    named |= set(re.findall(r"\banabranch_\w+", (FILES / "keda.yaml").read_text()))
    assert len(named) >= 6
    assert named - {"anabranch_records_processed"} <= IN_PROMETHEUS  # the rest of a rule's own name


def test_log_queries_ask_for_events_and_fields_that_exist(resources):
    queries = [one["Properties"]["QueryString"] for one in resources.values() if one["Type"].startswith("AWS::Logs")]
    assert len(queries) == 4
    for query in queries:
        for name in re.findall(r'event = "(\w+)"', query):
            fields = {field.name for field in msgspec.structs.fields(getattr(events, name))}
            assert set(re.findall(r"(?:sum|max|latest)\((\w+)\)", query)) <= fields
            assert all(field in fields for field in re.split(r", *", query.partition(" by ")[2].split("\n")[0])
                       if not field.startswith("bin("))  # fmt: skip


def test_the_systemd_unit_finds_its_module_and_shares_a_lease_file_that_stays():
    """systemd starts a program in `/`, without a home: the module and the lease file need folders."""
    unit = configparser.RawConfigParser()
    unit.optionxform = str
    unit.read_string((FILES / "billing@.service").read_text())
    service = unit["Service"]
    assert service["ExecStart"].startswith(service["WorkingDirectory"] + "/")
    leases = service["Environment"].removeprefix("ANABRANCH_LEASES=sqlite://")
    assert Path(leases).parent == Path("/var/lib", service["StateDirectory"])
    assert float(service["TimeoutStopSec"]) >= LeaseSettings().drain_deadline + 5
