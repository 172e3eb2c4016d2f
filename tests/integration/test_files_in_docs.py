"""The files in `docs/files` pass the validators of CloudFormation, Prometheus, Kubernetes and ECS."""

import json
import subprocess
import sys
from pathlib import Path

import botocore.session
import kubernetes_validate
import pytest
import yaml
from botocore.validate import ParamValidator

from anabranch import LeaseSettings

from services import require_promtool

pytestmark = pytest.mark.services

FILES = Path(__file__).parents[2] / "docs" / "files"
FINAL_COMMIT_SECONDS = 5
"""What a worker needs after the drain, to commit and to release its leases."""


def run(*command, **options):
    """Returns the standard output. Fails with all output if the command does."""
    done = subprocess.run(command, capture_output=True, text=True, check=False, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_cloudformation_accepts_the_dashboard_and_the_alarms():
    run(Path(sys.executable).parent / "cfn-lint", "--include-checks", "W", "--", FILES / "cloudwatch.yaml")


def test_the_validator_of_cloudformation_finds_a_mistake_in_the_template(tmp_path):
    broken = (FILES / "cloudwatch.yaml").read_text().replace("ComparisonOperator: Less", "ComparisonOperator: Fewer")
    (tmp_path / "broken.yaml").write_text(broken)
    with pytest.raises(AssertionError, match="FewerThanThreshold"):
        run(Path(sys.executable).parent / "cfn-lint", tmp_path / "broken.yaml")


def test_prometheus_accepts_all_rules_and_each_fires_as_in_its_test_file():
    promtool = require_promtool()
    assert "8 rules found" in run(promtool, "check", "rules", FILES / "prometheus-rules.yaml")
    run(promtool, "test", "rules", "prometheus-rules-test.yaml", cwd=FILES)


def test_kubernetes_accepts_the_manifests_and_the_grace_period_outlasts_the_drain():
    documents = list(yaml.safe_load_all((FILES / "kubernetes.yaml").read_text()))
    for document in documents:
        kubernetes_validate.validate(document, desired_version=kubernetes_validate.latest_version(), strict=True)
    pod = next(one for one in documents if one["kind"] == "Deployment")["spec"]["template"]["spec"]
    assert pod["terminationGracePeriodSeconds"] >= LeaseSettings().drain_deadline + FINAL_COMMIT_SECONDS
    program, subcommand, *_ = pod["containers"][0]["command"]
    assert "--health-port" in run(Path(sys.executable).parent / program, subcommand, "--help")


def test_ecs_accepts_the_task_definition_and_the_stop_timeout_outlasts_the_drain():
    task = json.loads((FILES / "ecs-task.json").read_text())
    model = botocore.session.get_session().get_service_model("ecs").operation_model("RegisterTaskDefinition")
    report = ParamValidator().validate(task, model.input_shape)
    assert not report.has_errors(), report.generate_report()
    assert task["containerDefinitions"][0]["stopTimeout"] >= LeaseSettings().drain_deadline + FINAL_COMMIT_SECONDS
