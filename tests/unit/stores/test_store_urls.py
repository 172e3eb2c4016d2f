import logging
from pathlib import Path

import pytest

from anabranch.config import Aws
from anabranch.errors import ConfigurationError, LeaseStoreInvalidError
from anabranch.stores import (
    DynamoDbLeaseStore,
    MemoryLeaseStore,
    RedisLeaseStore,
    S3LeaseStore,
    SqliteLeaseStore,
    default_store,
    open_store,
    urls,
)


@pytest.mark.parametrize("url", ["memory:", "memory://", "MEMORY://"])
def test_memory_is_named_by_its_scheme(url):
    assert isinstance(open_store(url, "billing"), MemoryLeaseStore)


def test_a_store_object_is_used_as_it_is():
    store = MemoryLeaseStore()
    assert open_store(store, "billing") is store


@pytest.mark.parametrize(
    "url, path",
    [
        ("sqlite:///var/lib/leases.db", "/var/lib/leases.db"),
        ("sqlite:////var/lib/leases.db", "/var/lib/leases.db"),
        ("sqlite:/var/lib/leases.db", "/var/lib/leases.db"),
        ("SQLite:///a%20b.db", "/a b.db"),
        ("sqlite:leases.db", "leases.db"),
        ("sqlite:./run/leases.db", "run/leases.db"),
    ],
)
def test_a_sqlite_url_names_a_file(url, path):
    store = open_store(url, "billing")
    assert isinstance(store, SqliteLeaseStore)
    assert store.path == Path(path)
    assert store.app == "billing"


@pytest.mark.parametrize("url", ["sqlite:", "sqlite://", "sqlite:///", "sqlite://leases.db", "sqlite:///x.db?mode=ro"])
def test_a_sqlite_url_without_a_path_says_how_it_is_written(url):
    with pytest.raises(ConfigurationError, match=r"sqlite:///absolute/path"):
        open_store(url, "billing")


@pytest.mark.parametrize(
    "url, table",
    [("dynamodb://", "anabranch"), ("dynamodb:", "anabranch"), ("DynamoDB://My_table.1-x/", "My_table.1-x")],
)
def test_a_dynamodb_url_names_a_table(url, table):
    store = open_store(url, "billing")
    assert isinstance(store, DynamoDbLeaseStore)
    assert (str(store), store.app, store.checkpoint_interval) == (f"dynamodb://{table}", "billing", 10.0)


def test_a_dynamodb_url_has_options():
    url = "dynamodb://t01?region=eu-west-1&endpoint=http://localhost:8000&create_table=never"
    table = open_store(url, "billing", Aws(profile="production")).table
    assert (table._clients._region, table._clients._endpoint_url) == ("eu-west-1", "http://localhost:8000")
    assert table._may_create is False
    assert table._account.aws.profile == "production"


@pytest.mark.parametrize(
    "url, words",
    [
        ("dynamodb://a", "3 to 255 letters, digits"),
        ("dynamodb://table/with/path", r"write dynamodb://\[table\]"),
        ("dynamodb://user:secret@table", r"write dynamodb://\[table\]"),
        ("dynamodb://[table", r"write dynamodb://\[table\]"),
        ("dynamodb://t01?regoin=x", "has no option regoin: there are region, endpoint and create_table"),
        ("dynamodb://t01?region=EU", "region= looks like eu-west-1"),
        ("dynamodb://t01?region=eu-west-1&region=eu-west-2", "given twice"),
        ("dynamodb://t01?endpoint=localhost:8000", "endpoint= looks like http://localhost:8000"),
        ("dynamodb://t01?endpoint=http://u:secret@host", "endpoint= looks like http://localhost:8000"),
        ("dynamodb://t01?endpoint=http://host:port", "endpoint= looks like http://localhost:8000"),
        ("dynamodb://t01?create_table=no", "create_table= can only be 'never'"),
    ],
)
def test_a_wrong_dynamodb_url_says_what_would_be_right(url, words):
    with pytest.raises(ConfigurationError, match=words) as caught:
        open_store(url, "billing")
    assert "secret" not in str(caught.value)


def test_all_mistakes_of_a_url_are_named_at_once():
    with pytest.raises(ConfigurationError) as caught:
        open_store("dynamodb://a?region=x1&create_table=maybe", "billing")
    assert len(caught.value.violations) == 3


def test_the_default_comes_from_the_environment():
    store = default_store("billing", {"ANABRANCH_LEASES": "dynamodb://leases", "KUBERNETES_SERVICE_HOST": "x"})
    assert str(store) == "dynamodb://leases"


def test_a_wrong_default_names_its_variable():
    with pytest.raises(ConfigurationError, match=r"^ANABRANCH_LEASES: leases='mysql://' is not a lease store"):
        default_store("billing", {"ANABRANCH_LEASES": "mysql://"})


@pytest.mark.parametrize(
    "url, shown, fields",
    [
        ("redis://host", "redis://host:6379/0", ("host", 6379, 0, None, None, None)),
        ("REDIS://host:7000/3", "redis://host:7000/3", ("host", 7000, 3, None, None, None)),
        ("redis://:secret@host/", "redis://host:6379/0", ("host", 6379, 0, None, "secret", None)),
        (
            "rediss://fleet:s%40e%2Fc@[::1]:7000/1?ssl_cert_reqs=none",
            "rediss://[::1]:7000/1",
            ("::1", 7000, 1, "fleet", "s@e/c", {"ssl_cert_reqs": "none"}),
        ),
    ],
)
def test_a_redis_url_names_a_server_and_a_user(url, shown, fields):
    store = open_store(url, "billing")
    assert isinstance(store, RedisLeaseStore)
    assert (str(store), tuple(store.address), store.app, store.checkpoint_interval) == (shown, fields, "billing", 1.0)


def test_a_redis_url_has_options():
    store = open_store("redis://host?replicas=2&durability=accept_loss", "billing")
    assert (store.replicas, store.accepts_loss) == (2, True)
    plain = open_store("redis://host", "billing")
    assert (plain.replicas, plain.accepts_loss) == (0, False)


@pytest.mark.parametrize(
    "url, words",
    [
        ("redis://", r"write redis://\[\[user\]:password@\]host"),
        ("redis://:secret@", r"write redis://\[\[user\]:password@\]host"),
        ("redis://user:sec?ret@host/0", "%3F"),
        ("redis://user:sec#ret@host/0", "%23"),
        ("redis://user:secret@host:port/0", r"write redis://\[\[user\]:password@\]host"),
        ("redis://user:secret@host/zero", r"write redis://\[\[user\]:password@\]host"),
        ("redis:user:secret@host/0", r"write redis://\[\[user\]:password@\]host"),
        ("redis:/user:secret@host/0", r"write redis://\[\[user\]:password@\]host"),
        ("redis//user:secret@host/0", "is not a lease store"),
        ("user:secret@host/0", "is not a lease store"),
        ("redis://user:secret", r"write redis://\[\[user\]:password@\]host"),
        ("redis://user:12?secret@host", "%3F"),
        ("redis://user:p@12?secret@host", "has an option that it does not have: there are replicas and durability"),
        ("rediss://user:12?ssl_ca_certs=secret@host", "%3F"),
        ("rediss://u:p@12?ssl_ca_certs=secret@host", "ssl_ca_certs= does not name a file"),
        ("redis://host/0?password=secret", "has no option password: there are replicas and durability"),
        ("redis://host/0?ssl_ca_certs=/ca.pem", "has no option ssl_ca_certs"),
        ("redis://host/0?replicas=all", "replicas= is a number"),
        ("redis://host/0?durability=high", "durability= can only be 'accept_loss'"),
        ("rediss://host/0?ssl_cert_reqs=optional", "ssl_cert_reqs= is 'required'"),
    ],
)
def test_a_wrong_redis_url_says_what_would_be_right_and_no_secret(url, words):
    with pytest.raises(ConfigurationError, match=words) as caught:
        open_store(url, "billing")
    assert not any(word in str(caught.value) for word in ("secret", "sec?", "sec#", "ret@"))


@pytest.mark.parametrize(
    "url, shown", [("s3://my-bucket", "s3://my-bucket"), ("S3://my.bucket/a/b%20c/", "s3://my.bucket/a/b c")]
)
def test_an_s3_url_names_a_bucket_and_a_prefix(url, shown):
    store = open_store(f"{url}?region=eu-west-1&endpoint=http://localhost:9000", "billing")
    assert isinstance(store, S3LeaseStore)
    assert (str(store), store.app, store.checkpoint_interval) == (shown, "billing", 60.0)


@pytest.mark.parametrize(
    "url, words",
    [
        ("s3://", r"write s3://bucket\[/prefix\]"),
        ("s3:///prefix", r"write s3://bucket\[/prefix\]"),
        ("s3://key:secret@bucket", r"write s3://bucket\[/prefix\]"),
        ("s3://bucket?region=x1", "region= looks like eu-west-1"),
        ("s3://bucket?replicas=1", "has no option replicas: there are region and endpoint"),
        ("s3://key:12?secret@bucket", r"write s3://bucket\[/prefix\]"),
        ("s3://key?secret@bucket", "has an option that it does not have: there are region and endpoint"),
    ],
)
def test_a_wrong_s3_url_says_what_would_be_right(url, words):
    with pytest.raises(ConfigurationError, match=words) as caught:
        open_store(url, "billing")
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    "url, shown",
    [
        ("redis://u:secret@host/0?replicas=1", "redis://…@host/0?replicas=1"),
        ("redis://host/0?password=secret&replicas=1", "redis://host/0?…&replicas=1"),
        ("dynamodb://table?region=eu-west-1", "dynamodb://table?region=eu-west-1"),
        (
            "dynamodb://?endpoint=http://host:8000&create_table=never",
            "dynamodb://?endpoint=http://host:8000&create_table=never",
        ),
        ("s3://bucket?region=my secret", "s3://bucket?…"),
        ("redis://u:sec?ret@host/0", "redis://…@host/0"),
        ("redis://u:sec@ret@host/0", "redis://…@host/0"),
        ("dynamodb://table?endpoint=http://u:secret@host", "dynamodb://…@host"),
        ("REDISS://u:secret@host/0", "REDISS://…@host/0"),
        ("redis:u:secret@host/0", "redis:…@host/0"),
        ("redis:/u:secret@host/0", "redis:…@host/0"),
        ("redis//u:secret@host/0", "…@host/0"),
        ("u:secret@host", "…@host"),
        ("secret@host?replicas=1", "…@host?replicas=1"),
        ("redis://u:secret", "redis://u:…"),
        ("redis://[::1]:7000/0", "redis://[::1]:7000/0"),
        ("sqlite:///path/leases.db", "sqlite:///path/leases.db"),
    ],
)
def test_a_url_is_shown_without_what_may_be_secret(url, shown):
    assert urls.shown_url(url) == shown


def test_a_store_of_a_later_version_says_so():
    with pytest.raises(ConfigurationError, match="not supported yet; supported are dynamodb://") as caught:
        open_store("postgresql://u:secret@host/db", "billing")
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("url", ["", "mysql://host/db", "/var/lib/leases.db", "memory://x", "sqlite", "redis"])
def test_an_unknown_store_names_the_known_ones(url):
    with pytest.raises(ConfigurationError, match=r"supported are dynamodb://.* sqlite:///.* and memory://"):
        open_store(url, "billing")


@pytest.mark.parametrize(
    "variable", ["KUBERNETES_SERVICE_HOST", "ECS_CONTAINER_METADATA_URI_V4", "AWS_LAMBDA_FUNCTION_NAME"]
)
def test_the_embedded_default_is_refused_on_a_container_platform(variable, tmp_path):
    with pytest.raises(ConfigurationError) as caught:
        default_store("billing", {variable: "x", "XDG_STATE_HOME": str(tmp_path)})
    message = str(caught.value)
    assert variable in message
    choices = ["leases='dynamodb://'", "leases='sqlite:///path'", "leases='memory://'"]
    places = [message.find(choice) for choice in choices]
    assert -1 not in places
    assert places == sorted(places)
    assert not list(tmp_path.iterdir())


def test_the_embedded_default_lies_in_the_users_state_directory(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    store = default_store("bill/ing", {"XDG_STATE_HOME": str(tmp_path)})
    assert isinstance(store, SqliteLeaseStore)
    assert store.path == tmp_path / "anabranch" / "bill%2Fing.db"
    assert store.path.parent.is_dir()
    assert "only processes on this machine" in caplog.text


def test_a_relative_state_directory_does_not_count(tmp_path):
    store = default_store("billing", {"XDG_STATE_HOME": "state", "HOME": str(tmp_path)})
    assert store.path == tmp_path / ".local" / "state" / "anabranch" / "billing.db"


def test_without_a_home_in_the_environment_the_users_own_is_taken(tmp_path, monkeypatch):
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    assert default_store("billing", {}).path.is_relative_to(tmp_path)


def test_a_state_directory_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "state").write_text("a file")
    with pytest.raises(LeaseStoreInvalidError, match=r"its folder cannot be created .* XDG_STATE_HOME"):
        default_store("billing", {"XDG_STATE_HOME": str(tmp_path / "state")})


def test_a_temporary_state_directory_is_warned_about(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(urls, "file_system", lambda path: "tmpfs")
    default_store("billing", {"XDG_STATE_HOME": str(tmp_path)})
    assert "is on tmpfs" in caplog.text
