"""Fan-out on the command line: `tail --fanout`, the consumers of a stream, and what doctor says about them."""

ARN = "arn:aws:kinesis:us-east-1:000000000000:stream/orders"


def register(server, *names):
    for name in names:
        server.call("RegisterStreamConsumer", StreamARN=ARN, ConsumerName=name)


def consumers(server):
    found = server.call("ListStreamConsumers", StreamARN=ARN)["Consumers"]
    return [consumer["ConsumerName"] for consumer in found]


def test_tail_has_records_pushed_and_leaves_no_consumer(server, cli):
    for number in range(20):
        server.call("PutRecord", StreamName="orders", PartitionKey=f"k{number}", Data=str(number).encode())
    ended = cli("tail", "orders", "--fanout", "--from", "horizon", "--no-follow", "--format", "%s")
    assert (ended.code, ended.err) == (0, "")
    assert sorted(map(int, ended.out.split())) == list(range(20))
    assert consumers(server) == []


def test_consumers_are_listed_and_removed(server, cli):
    assert "no fan-out consumers" in cli("streams", "consumers", "ls", "orders").err
    register(server, "audit", "billing")
    listed = cli("streams", "consumers", "ls", "orders")
    assert [line.split()[:2] for line in listed.out.splitlines()[1:]] == [["audit", "ACTIVE"], ["billing", "ACTIVE"]]
    document = cli("streams", "consumers", "ls", "orders", "--json").json
    assert [consumer["name"] for consumer in document] == ["audit", "billing"]
    assert document[0]["arn"].startswith(ARN)
    ended = cli("streams", "consumers", "rm", "orders", "audit", "--yes")
    assert (ended.code, ended.out) == (0, "audit: removed\n")
    assert consumers(server) == ["billing"]


def test_what_cannot_be_removed_is_named(server, cli):
    register(server, "billing")
    ended = cli("streams", "consumers", "rm", "orders", "biling", "--yes")
    assert ended.code == 1
    assert "orders has no consumer biling; it has: billing" in ended.err
    assert cli("streams", "consumers", "rm", "orders").code == 2
    assert cli("streams", "consumers", "ls", "orders", "billing").code == 2
    assert cli("streams", "consumers", "drop", "orders").code == 2
    assert consumers(server) == ["billing"]


def test_doctor_finds_consumers_that_were_left_behind(server, cli):
    register(server, "anabranch-0123abcd", "anabranch-billing-0123abcd", "theirs")
    findings = {finding["check"]: finding for finding in cli("doctor", "orders", "--json").json}
    found = findings["fan-out"]
    assert found["state"] == "warn"
    assert "made by anabranch: anabranch-0123abcd, anabranch-billing-0123abcd" in found["finding"]
    assert "consumers rm orders anabranch-0123abcd" in found["advice"]
    assert "anabranch-billing" not in found["advice"]


def test_doctor_finds_the_consumer_of_an_application_that_was_deleted(server, cli, tmp_path):
    register(server, "anabranch-billing-0123abcd", "anabranch-audit-0123abcd")
    leases = f"sqlite:///{tmp_path}/leases.db"
    document = cli("doctor", "orders", "--app", "billing", "--leases", leases, "--json").json
    (found,) = [finding for finding in document if finding["check"] == "consumers"]
    assert found["finding"] == "left by an earlier application 'billing': anabranch-billing-0123abcd"
    assert found["advice"] == "anabranch streams consumers rm orders anabranch-billing-0123abcd"
    document = cli("doctor", "orders", "--app", "payments", "--leases", leases, "--json").json
    assert "consumers" not in {finding["check"] for finding in document}
