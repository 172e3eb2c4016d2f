"""Which lease store a consumer uses: a URL, an object, or the default.

The default of an application is a SQLite file in the user's state directory. In a container platform it is refused
(rule U1): each container would have its own file, and every container would handle every record.
"""

import logging
from collections.abc import Mapping
from pathlib import Path, PurePath
from typing import Final
from urllib.parse import quote, unquote, urlsplit

from anabranch._ports import LeaseStore
from anabranch.errors import ConfigurationError, LeaseStoreInvalidError
from anabranch.stores.memory import MemoryLeaseStore
from anabranch.stores.sqlite import SqliteLeaseStore
from anabranch.stores.sqlite_database import file_system, forgets

__all__ = ["EMBEDDED_SUFFIX", "default_store", "embedded_file", "embedded_folder", "open_store", "shown_url"]

_log = logging.getLogger(__name__)

EMBEDDED_SUFFIX: Final = ".db"
_KNOWN: Final = "memory:// (keeps nothing) and sqlite:///path/to/leases.db (processes of one machine)"
_LATER: Final = ("dynamodb", "postgres", "postgresql", "redis", "rediss")
_PLATFORMS: Final = (
    ("KUBERNETES_SERVICE_HOST", "Kubernetes"),
    ("ECS_CONTAINER_METADATA_URI_V4", "Amazon ECS"),
    ("ECS_CONTAINER_METADATA_URI", "Amazon ECS"),
    ("AWS_LAMBDA_FUNCTION_NAME", "AWS Lambda"),
    ("AWS_LAMBDA_RUNTIME_API", "AWS Lambda"),
)


def open_store(leases: str | LeaseStore, app: str) -> LeaseStore:
    """The store for `leases=`, not yet opened. An object is returned as it is."""
    if not isinstance(leases, str):
        return _checked(leases)
    scheme, colon, _ = leases.partition(":")
    scheme = scheme.lower()
    if scheme == "memory" and leases.lower() in {"memory:", "memory://"}:
        return MemoryLeaseStore()
    if scheme == "sqlite" and colon:
        return SqliteLeaseStore(_sqlite_path(leases), app)
    if scheme in _LATER and colon:
        raise ConfigurationError(
            f"leases={shown_url(leases)!r}: {scheme}:// is not supported yet; supported are {_KNOWN}"
        )
    raise ConfigurationError(f"leases={shown_url(leases)!r} is not a lease store: supported are {_KNOWN}")


def _checked(leases: LeaseStore) -> LeaseStore:
    if isinstance(leases, PurePath):
        raise ConfigurationError(f"leases={leases!r} is a path: write leases='sqlite:{leases}'")
    if isinstance(leases, type) or not callable(getattr(leases, "heartbeat", None)):
        raise ConfigurationError(f"leases={leases!r} must be a URL or a lease store object")
    return leases


def _sqlite_path(url: str) -> Path:
    try:
        parts = urlsplit(url)
    except ValueError:  # for example an unclosed [ of an IPv6 address
        parts = None
    if parts is None or parts.netloc or parts.query or parts.fragment or not parts.path.strip("/"):
        raise ConfigurationError(
            f"leases={shown_url(url)!r}: write sqlite:///absolute/path/leases.db (three slashes), "
            "or sqlite:relative/leases.db"
        )
    path = unquote(parts.path)
    name = path.rpartition("/")[2]
    if name == ":memory:":
        raise ConfigurationError(f"leases={url!r}: write memory:// for leases that are kept in memory")
    if name in {"", ".", ".."}:
        raise ConfigurationError(f"leases={url!r} names a folder: name a file in it, such as leases.db")
    if path.lstrip("/").startswith("~"):
        raise ConfigurationError(f"leases={url!r}: ~ is not expanded; write the full path")
    if "\0" in path:
        raise ConfigurationError(f"leases={url!r}: a path cannot contain a NUL character")
    # SQLAlchemy's users write four slashes for an absolute path: both are the same file.
    return Path("/" + path.lstrip("/")) if path.startswith("/") else Path(path)


def shown_url(url: str) -> str:
    """A URL without what may be secret: user, password and query."""
    address, mark, _ = url.partition("?")
    before, at, after = address.rpartition("@")
    hidden = f"{before.partition('://')[0]}://…@{after}" if at else address
    return f"{hidden}?…" if mark else hidden


def default_store(app: str, environ: Mapping[str, str]) -> LeaseStore:
    """The embedded store: a file in the user's state directory."""
    for variable, platform in _PLATFORMS:
        if environ.get(variable):
            raise ConfigurationError(
                f"application {app!r} has no lease store, and this is {platform} ({variable} is set), where a file "
                "inside the container is neither shared nor kept: every container would handle every record. "
                "Choose one: a store that the whole fleet shares (any object that passes "
                "anabranch.testing.check_lease_store); leases='sqlite:///path' on a volume that outlives this "
                "container, if there is only one; leases='memory://' to keep no position"
            )
    folder = embedded_folder(environ)
    path = embedded_file(app, environ)
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise LeaseStoreInvalidError(
            f"the leases of application {app!r} would be kept in {path}, but its folder cannot be created "
            f"({error.strerror}): pass leases='sqlite:///path', or set XDG_STATE_HOME"
        ) from error
    _log.info(
        "the leases of application %r are in %s, which only processes on this machine can share; "
        "workers on several machines need a shared store (leases=)", app, path,
    )  # fmt: skip
    if forgets(kind := file_system(folder)):
        _log.warning(
            "%s is on %s: the application's position is lost when that is removed; use a persistent path", path, kind
        )
    return SqliteLeaseStore(path, app)


def embedded_folder(environ: Mapping[str, str]) -> Path:
    """The folder of the embedded stores; it may not exist yet."""
    return _state_directory(environ) / "anabranch"


def embedded_file(app: str, environ: Mapping[str, str]) -> Path:
    return embedded_folder(environ) / f"{quote(app, safe=' @+')}{EMBEDDED_SUFFIX}"


def _state_directory(environ: Mapping[str, str]) -> Path:
    """By the XDG base directory specification, only absolute paths count."""
    named = environ.get("XDG_STATE_HOME", "")
    if named.startswith("/"):
        return Path(named)
    home = environ.get("HOME", "")
    return (Path(home) if home.startswith("/") else Path.home()) / ".local" / "state"
