"""`anabranch streams`: list, create, describe, delete, and what it says when that cannot be."""

ARN = "arn:aws:kinesis:us-east-1:000000000000:stream/orders"


def test_streams_are_listed_as_a_table_and_as_json(server, cli):
    table = cli("streams", "ls")
    assert table.code == 0
    assert table.out.splitlines()[0].split() == ["STREAM", "STATUS", "MODE", "CREATED"]
    assert [line.split()[:3] for line in table.out.splitlines()[1:]] == [
        ["orders", "ACTIVE", "PROVISIONED"],
        ["returns", "ACTIVE", "PROVISIONED"],
    ]
    listed = cli("streams", "ls", "--json").json
    assert [(stream["name"], stream["status"]) for stream in listed] == [("orders", "ACTIVE"), ("returns", "ACTIVE")]
    assert listed[0]["arn"] == ARN


def test_all_pages_of_streams_are_listed(server, cli):
    for number in range(105):
        server.call("CreateStream", StreamName=f"s{number:03}", ShardCount=1)
    assert len(cli("streams", "ls", "--json").json) == 107


def test_an_empty_account_shows_how_to_create_a_stream(server, cli):
    for name in ("orders", "returns"):
        assert cli("streams", "delete", name, "--yes").code == 0
    empty = cli("streams", "ls")
    assert (empty.code, empty.out) == (0, "")
    assert "anabranch streams create" in empty.err
    assert "anabranch streams create payments --shards 1" in cli("shards", "payments").err


def test_a_stream_is_created_waited_for_described_and_deleted(slow_server, cli):
    created = cli("streams", "create", "payments", "--shards", "3", "--retention", "48")
    assert created.code == 0
    assert created.out.startswith("payments: ACTIVE, 3 open shards, arn:aws:kinesis:")
    assert "creating payments: ACTIVE" in created.err
    described = cli("streams", "describe", "payments", "--json").json
    assert described["open_shard_count"] == 3
    assert described["retention_hours"] == 48
    assert described["consumers"] == []
    deleted = cli("streams", "delete", "payments", "--yes")
    assert (deleted.code, deleted.out) == (0, "payments: deleted\n")
    assert "deleting payments: deleted" in deleted.err
    assert cli("streams", "describe", "payments").code == 1


def test_a_stream_without_a_number_of_shards_is_on_demand_and_need_not_be_waited_for(frozen_server, cli):
    created = cli("streams", "create", "clicks", "--no-wait", "--json").json
    assert created["status"] == "CREATING"
    assert created["stream_mode"] == "ON_DEMAND"
    assert cli("streams", "delete", "clicks", "--yes", "--no-wait").out == "clicks: DELETING\n"


def test_a_description_names_everything_and_takes_an_arn(server, cli):
    server.call("RegisterStreamConsumer", StreamARN=ARN, ConsumerName="billing")
    described = cli("streams", "describe", ARN)
    facts = {line[:15].strip(): line[15:].strip() for line in described.out.splitlines()}
    assert facts["stream"] == "orders"
    assert facts["status"] == "ACTIVE"
    assert facts["open shards"] == "2"
    assert facts["largest record"] == "1 MiB"
    assert facts["consumers"] == "billing"


def test_a_stream_with_consumers_is_deleted_only_with_the_option(server, cli):
    server.call("RegisterStreamConsumer", StreamARN=ARN, ConsumerName="billing")
    refused = cli("streams", "delete", "orders", "--yes")
    assert refused.code == 2
    assert "fan-out consumers (billing): add --with-consumers" in refused.err
    assert cli("streams", "delete", "orders", "--yes", "--with-consumers").code == 0


def test_nothing_is_deleted_without_a_terminal_to_confirm(server, cli):
    refused = cli("streams", "delete", "orders")
    assert refused.code == 2
    assert "pass --yes" in refused.err
    assert cli("streams", "describe", "orders").code == 0


def test_the_streams_that_exist_are_named_for_one_that_does_not(server, cli):
    missing = cli("streams", "describe", "ordrs")
    assert missing.code == 1
    assert "stream 'ordrs' does not exist in us-east-1 at http://127.0.0.1:" in missing.err
    assert "did you mean 'orders'? Existing streams: orders, returns" in missing.err
    assert "existing streams: orders, returns" in cli("streams", "describe", "zzz").err
    assert missing.err.count("\n") == 1


def test_an_arn_of_another_region_or_account_is_answered_with_the_one_that_is_here(server, cli):
    for elsewhere in (ARN.replace("us-east-1", "eu-west-1"), ARN.replace("000000000000", "123456789012")):
        missing = cli("shards", elsewhere)
        assert missing.code == 1
        assert f"stream '{elsewhere}' does not exist at http://127.0.0.1:" in missing.err
        assert f"; the stream with that name here is {ARN}\n" in missing.err
    assert cli("shards", ARN, "--region", "eu-west-1").code == 0  # an ARN's own region counts


def test_wrong_usage_ends_with_two_and_says_what_would_be_right(server, cli):
    for arguments, said in (
        (("streams",), "required: ACTION"),
        (("streams", "create", "a/b"), "a stream's name has 1 to 128 letters"),
        (("streams", "create", ARN), "pass a name, not an ARN"),
        (("streams", "create", "x", "--shards", "0"), "not a whole number above 0"),
        (("streams", "create", "x", "--retention", "1"), "'1' is not a number of hours from 24 to 8760"),
        (("streams", "create", "x", "--retention", "48", "--no-wait"), "omit --no-wait"),
        (("streams", "ls", "--region", "nowhere"), "a region looks like eu-west-1"),
        (("streams", "ls", "--endpoint-url", "localhost"), "an endpoint looks like http://localhost:4567"),
        (("streams", "ls", "--reg", "eu-west-1"), "unrecognized arguments"),
    ):
        ended = cli(*arguments)
        assert (ended.code, ended.out) == (2, ""), arguments
        assert said in ended.err, arguments


def test_an_error_of_the_service_is_one_line(server, cli):
    taken = cli("streams", "create", "orders", "--shards", "1")
    assert taken.code == 1
    assert taken.err.startswith("anabranch streams: CreateStream: ResourceInUseException: Stream orders")
    assert taken.err.count("\n") == 1
