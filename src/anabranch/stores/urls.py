"""Which store a consumer gets: from `leases=`, or from nothing at all.

A store is named by a URL or given as an object. With neither, a durable application gets a SQLite file in the user's
state directory; where such a file would be one of many, or gone with its container, that is refused with the choices
that there are (rule U1), because the alternative is every record handled once by each pod.
"""

import logging
from collections.abc import Mapping
from pathlib import Path, PurePath
from typing import Final
from urllib.parse import quote, unquote, urlsplit

from anabranch._ports.lease_store import LeaseStore
from anabranch.errors import ConfigurationError, LeaseStoreInvalidError
from anabranch.stores.memory import MemoryLeaseStore
from anabranch.stores.sqlite import SqliteLeaseStore
from anabranch.stores.sqlite.place import file_system, forgets

__all__ = ["EMBEDDED_SUFFIX", "default_store", "embedded_file", "embedded_folder", "open_store"]

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
    """The store that `leases=` names, not yet opened. An object is returned as it is."""
    if not isinstance(leases, str):
        return _checked(leases)
    scheme, colon, _ = leases.partition(":")
    scheme = scheme.lower()
    if scheme == "memory" and leases.lower() in {"memory:", "memory://"}:
        return MemoryLeaseStore()
    if scheme == "sqlite" and colon:
        return SqliteLeaseStore(_sqlite_path(leases), app)
    if scheme in _LATER and colon:
        raise ConfigurationError(f"leases={_shown(leases)!r}: {scheme}:// is not in this version; it knows {_KNOWN}")
    raise ConfigurationError(f"leases={_shown(leases)!r} is no lease store: known are {_KNOWN}")


def _checked(leases: LeaseStore) -> LeaseStore:
    if isinstance(leases, PurePath):
        raise ConfigurationError(f"leases={leases!r} is a path: write leases='sqlite:{leases}'")
    if isinstance(leases, type) or not callable(getattr(leases, "heartbeat", None)):
        raise ConfigurationError(f"leases={leases!r} must be a URL, or an object that is a lease store")
    return leases


def _sqlite_path(url: str) -> Path:
    try:
        parts = urlsplit(url)
    except ValueError:  # as of an address that is not closed
        parts = None
    if parts is None or parts.netloc or parts.query or parts.fragment or not parts.path.strip("/"):
        raise ConfigurationError(
            f"leases={_shown(url)!r}: write sqlite:///absolute/path/leases.db (three slashes), "
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


def _shown(url: str) -> str:
    """Without the password that a store's URL may hold."""
    before, at, after = url.rpartition("@")
    return f"{before.partition('://')[0]}://…@{after}" if at else url


def default_store(app: str, environ: Mapping[str, str]) -> LeaseStore:
    """The embedded store of an application that names none: a file under the user's state directory."""
    for variable, platform in _PLATFORMS:
        if environ.get(variable):
            raise ConfigurationError(
                f"application {app!r} names no lease store, and this is {platform} ({variable} is set), where a file "
                "inside the container is neither shared nor kept, so that every container would handle every record. "
                "Choose one: a store that the whole fleet shares (any object that passes "
                "anabranch.testing.check_lease_store); leases='sqlite:///path' on a volume that outlives this "
                "container, for a single one; leases='memory://' to keep no position at all"
            )
    folder = embedded_folder(environ)
    path = embedded_file(app, environ)
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise LeaseStoreInvalidError(
            f"the leases of application {app!r} would be kept in {path}, but its folder cannot be made "
            f"({error.strerror}): name a file by leases='sqlite:///path', or set XDG_STATE_HOME"
        ) from error
    _log.info(
        "the leases of application %r are in %s, for the processes of this machine only; "
        "a fleet on several machines needs a store that they share (leases=)", app, path,
    )  # fmt: skip
    if forgets(kind := file_system(folder)):
        _log.warning("%s is on %s: the application's position is lost when it goes; name a lasting place", path, kind)
    return SqliteLeaseStore(path, app)


def embedded_folder(environ: Mapping[str, str]) -> Path:
    """Where embedded stores lie; it need not exist."""
    return _state_directory(environ) / "anabranch"


def embedded_file(app: str, environ: Mapping[str, str]) -> Path:
    return embedded_folder(environ) / f"{quote(app, safe=' @+')}{EMBEDDED_SUFFIX}"


def _state_directory(environ: Mapping[str, str]) -> Path:
    """As the XDG base directory specification has it: only absolute paths count."""
    named = environ.get("XDG_STATE_HOME", "")
    if named.startswith("/"):
        return Path(named)
    home = environ.get("HOME", "")
    return (Path(home) if home.startswith("/") else Path.home()) / ".local" / "state"
