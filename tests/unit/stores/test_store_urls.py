import logging
from pathlib import Path

import pytest

from anabranch.errors import ConfigurationError, LeaseStoreInvalidError
from anabranch.stores import MemoryLeaseStore, SqliteLeaseStore, default_store, open_store, urls


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
    with pytest.raises(ConfigurationError, match=r"sqlite:///absolute/path/leases\.db"):
        open_store(url, "billing")


@pytest.mark.parametrize(
    "url", ["dynamodb://billing", "redis://u:secret@host/0", "redis://host/0?password=secret", "postgresql://host/db"]
)
def test_a_store_of_a_later_version_says_so(url):
    with pytest.raises(ConfigurationError, match="not supported yet; supported are memory://") as caught:
        open_store(url, "billing")
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("url", ["", "mysql://host/db", "/var/lib/leases.db", "memory://x", "sqlite", "redis"])
def test_an_unknown_store_names_the_known_ones(url):
    with pytest.raises(ConfigurationError, match=r"supported are memory:// .* and sqlite:///"):
        open_store(url, "billing")


@pytest.mark.parametrize(
    "variable", ["KUBERNETES_SERVICE_HOST", "ECS_CONTAINER_METADATA_URI_V4", "AWS_LAMBDA_FUNCTION_NAME"]
)
def test_the_embedded_default_is_refused_on_a_container_platform(variable, tmp_path):
    with pytest.raises(ConfigurationError) as caught:
        default_store("billing", {variable: "x", "XDG_STATE_HOME": str(tmp_path)})
    message = str(caught.value)
    assert variable in message
    for choice in ("the whole fleet shares", "leases='sqlite:///path'", "leases='memory://'"):
        assert choice in message
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


def test_a_state_directory_that_is_soon_forgotten_is_warned_of(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(urls, "file_system", lambda path: "tmpfs")
    default_store("billing", {"XDG_STATE_HOME": str(tmp_path)})
    assert "is on tmpfs" in caplog.text
