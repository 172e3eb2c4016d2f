"""`anabranch doctor`: what it finds when all is well, and what it advises when not."""

import pytest

from anabranch._cli.doctor import _clock
from anabranch._wire import aggregate


def states(ended):
    return {line.split()[1]: line.split()[0] for line in ended.out.splitlines() if not line.startswith(" ")}


def test_all_is_well_for_a_stream_and_an_application(server, cli, tmp_path):
    ended = cli("doctor", "orders", "--app", "billing", "--leases", f"sqlite://{tmp_path}/leases.db")
    assert ended.code == 0
    assert states(ended) == dict.fromkeys(
        (
            "versions", "region", "credentials", "endpoint", "clock", "limits", "stream", "reading", "writing",
            "fan-out", "store", "latency",
        ),
        "ok",
    )  # fmt: skip
    codecs = "pure Python" if aggregate.__file__.endswith(".py") else "compiled"
    assert f"aggregate codecs: {codecs}" in ended.out
    assert "access key ...ocal, from env" in ended.out
    assert "application 'billing' has not used it yet" in ended.out
    assert list(tmp_path.iterdir()) == []
    assert server.call("DescribeStreamSummary", StreamName="orders")["StreamDescriptionSummary"]["OpenShardCount"] == 2


def test_a_dry_run_writes_nothing(server, cli):
    assert cli("doctor", "returns").code == 0
    iterator = server.call(
        "GetShardIterator",
        StreamName="returns",
        ShardId="shardId-000000000000",
        ShardIteratorType="TRIM_HORIZON",
    )["ShardIterator"]
    assert server.call("GetRecords", ShardIterator=iterator)["Records"] == []


def test_json_has_the_same_findings(server, cli):
    findings = cli("doctor", "--json").json
    assert [finding["check"] for finding in findings if finding["state"] == "ok"] == [
        "versions",
        "region",
        "credentials",
        "endpoint",
        "clock",
        "limits",
    ]
    assert {finding["check"]: finding["advice"] for finding in findings}["permissions"] is not None


@pytest.mark.parametrize(
    "operation, check, state, advice",
    [
        ("DescribeStreamSummary", "stream", "fail", "allow kinesis:DescribeStreamSummary"),
        ("ListShards", "reading", "fail", "allow kinesis:ListShards"),
        ("GetRecords", "reading", "fail", "allow kinesis:GetRecords"),
        ("PutRecord", "writing", "fail", "allow kinesis:PutRecord"),
        ("DescribeLimits", "limits", "warn", "only this check needs it"),
        ("ListStreamConsumers", "fan-out", "warn", "only enhanced fan-out needs it"),
    ],
)
def test_a_missing_permission_is_named(server, cli, operation, check, state, advice):
    server.local.faults.on(operation).error("AccessDeniedException", "User: arn:aws:iam::1:user/x is not authorized")
    ended = cli("doctor", "orders")
    assert ended.code == (1 if state == "fail" else 0)
    assert states(ended)[check] == state
    assert f"-> {advice}" in ended.out or advice in ended.out


def test_a_service_that_does_not_support_dry_runs_is_not_written_to(server, cli):
    server.local.faults.on("GetShardIterator").error("ValidationException", "unknown member DryRun").once()
    server.local.faults.on("PutRecord").error("InternalFailure", "nobody should have asked")
    ended = cli("doctor", "orders")
    assert ended.code == 0
    assert states(ended)["writing"] == "skip"


def test_a_dry_run_of_a_write_that_is_not_confirmed_is_a_warning(server, cli):
    server.local.faults.on("PutRecord").error("ValidationException", "unknown member DryRun")
    ended = cli("doctor", "orders")
    assert states(ended)["writing"] == "warn"
    assert "it may have written one record" in ended.out


def test_checks_are_skipped_if_what_they_need_has_failed(cli, monkeypatch):
    nowhere = cli("doctor")
    assert nowhere.code == 1
    assert states(nowhere) == {"versions": "ok", "region": "fail", "store": "skip"}
    assert "-> pass --region or set AWS_REGION" in nowhere.out
    nobody = cli("doctor", "--region", "eu-west-1", "--endpoint-url", "http://127.0.0.1:9")
    assert nobody.code == 1
    assert states(nobody) == {
        "versions": "ok",
        "region": "ok",
        "credentials": "fail",
        "endpoint": "fail",
        "clock": "skip",
        "permissions": "skip",
        "store": "skip",
    }
    assert "refused the connection" in nobody.out


def test_a_missing_stream_and_an_unknown_store_are_reported(server, cli):
    missing = cli("doctor", "ordrs")
    assert missing.code == 1
    assert "-> run anabranch streams ls to list the streams" in missing.out
    unknown = cli("doctor", "--leases", "ftp://leases")
    assert unknown.code == 1
    assert states(unknown)["store"] == "fail"
    assert "is not a lease store: supported are" in unknown.out


def test_the_store_of_an_application_is_its_file_here(server, cli):
    assert "application 'billing' has not used it yet" in cli("doctor", "--app", "billing").out


@pytest.mark.parametrize(
    "ahead_ms, state, finding",
    [
        (None, "skip", "the response has no Date header"),
        (-900, "ok", "in sync with the service's clock"),
        (61_000, "warn", "61.0 s ahead of the service's clock"),
        (-400_000, "fail", "400.0 s behind the service's clock"),
    ],
)
def test_a_clock_is_judged_by_how_far_it_is_off(ahead_ms, state, finding):
    found = _clock(ahead_ms)
    assert (found.state, found.finding) == (state, finding)
    assert (found.advice is not None) == (state in {"warn", "fail"})
