"""Which lease store a consumer uses: a URL, an object, or the default.

The default of an application is the URL in ANABRANCH_LEASES, else a SQLite file in the user's state directory. In a
container platform that file is refused (rule U1): each container would have its own file, and every container would
handle every record.
"""

import logging
import re
from collections.abc import Mapping
from pathlib import Path, PurePath
from typing import Final
from urllib.parse import SplitResult, parse_qsl, quote, unquote, urlsplit

from anabranch._model.kinds import refuse
from anabranch._ports import LeaseStore
from anabranch.config import Aws
from anabranch.errors import ConfigurationError, LeaseStoreInvalidError
from anabranch.stores.dynamodb import DEFAULT_TABLE, DynamoDbLeaseStore
from anabranch.stores.memory import MemoryLeaseStore
from anabranch.stores.redis import RedisAddress, RedisLeaseStore
from anabranch.stores.s3 import S3LeaseStore
from anabranch.stores.sqlite import SqliteLeaseStore, file_system, is_ephemeral

_log = logging.getLogger(__name__)

EMBEDDED_SUFFIX: Final = ".db"
LEASES_VARIABLE: Final = "ANABRANCH_LEASES"
_KNOWN: Final = (
    "dynamodb://[table] and redis://host (any number of machines), s3://bucket/prefix (one worker), "
    "sqlite:///path/to/leases.db (processes of one machine) and memory:// (keeps nothing)"
)
_TABLE: Final = re.compile(r"[a-zA-Z0-9_.-]{3,255}")
_REGION: Final = re.compile(r"[a-z]{2}(-[a-z0-9]+)+-[0-9]+|[a-z]+")
_BUCKET: Final = re.compile(r"[a-zA-Z0-9._-]{3,255}")
_PLATFORMS: Final = (
    ("KUBERNETES_SERVICE_HOST", "Kubernetes"),
    ("ECS_CONTAINER_METADATA_URI_V4", "Amazon ECS"),
    ("ECS_CONTAINER_METADATA_URI", "Amazon ECS"),
    ("AWS_LAMBDA_FUNCTION_NAME", "AWS Lambda"),
    ("AWS_LAMBDA_RUNTIME_API", "AWS Lambda"),
)


def leases_from(environ: Mapping[str, str]) -> str | None:
    """The default of `leases=`, from ANABRANCH_LEASES."""
    return environ.get(LEASES_VARIABLE) or None


def open_store(leases: str | LeaseStore, app: str, aws: Aws | None = None) -> LeaseStore:
    """The store for `leases=`, not yet opened. An object is returned as it is. `aws` is for stores in AWS."""
    if not isinstance(leases, str):
        return _checked(leases)
    named = f"leases={shown_url(leases)!r}"
    scheme, colon, rest = leases.partition(":")
    match scheme.lower() if colon else "":
        case "memory" if rest in {"", "//"}:
            return MemoryLeaseStore()
        case "sqlite":
            return SqliteLeaseStore(sqlite_path(leases, named), app)
        case "dynamodb":
            return _dynamodb_store(leases, named, app, aws)
        case "redis" | "rediss":
            return _redis_store(leases, named, app)
        case "s3":
            return _s3_store(leases, named, app, aws)
        case "postgres" | "postgresql" as later:
            raise ConfigurationError(f"{named}: {later}:// is not supported yet; supported are {_KNOWN}")
    raise ConfigurationError(f"{named} is not a lease store: supported are {_KNOWN}")


def _checked(leases: LeaseStore) -> LeaseStore:
    if isinstance(leases, PurePath):
        raise ConfigurationError(f"leases={leases!r} is a path: write leases='sqlite:{leases}'")
    if isinstance(leases, type) or not callable(getattr(leases, "heartbeat", None)):
        raise ConfigurationError(f"leases={leases!r} must be a URL or a lease store object")
    return leases


def _split(url: str) -> SplitResult | None:
    try:
        return urlsplit(url)
    except ValueError:  # for example an unclosed [ of an IPv6 address
        return None


def _port(parts: SplitResult) -> int | None:
    """None if it is not given, 0 if it is wrong."""
    try:
        return parts.port
    except ValueError:
        return 0


def _dynamodb_store(url: str, named: str, app: str, aws: Aws | None) -> DynamoDbLeaseStore:
    parts = _split(url)
    if parts is None or parts.path.strip("/") or parts.fragment or "@" in parts.netloc:
        raise ConfigurationError(f"{named}: write dynamodb://[table][?region=...][&endpoint=...][&create_table=never]")
    table = unquote(parts.netloc) or DEFAULT_TABLE
    violations = []
    if _TABLE.fullmatch(table) is None:
        violations.append(
            f"{named}: a DynamoDB table has a name of 3 to 255 letters, digits, underscores, dots and hyphens"
        )
    options = url_options(parts, named, ("region", "endpoint", "create_table"), violations)
    create = options.get("create_table")
    if create not in {None, "never"}:
        violations.append(f"{named}: create_table= can only be 'never'; without it a missing table is created")
    refuse(violations)
    return DynamoDbLeaseStore(
        app,
        table,
        region=options.get("region"),
        endpoint_url=options.get("endpoint"),
        create_table=create is None,
        aws=aws,
    )


def _redis_store(url: str, named: str, app: str) -> RedisLeaseStore:
    parts = _split(url)
    if (
        parts is None
        or not parts.hostname
        or _port(parts) == 0
        or parts.fragment
        or not (parts.path.strip("/") or "0").isdecimal()
        or ("@" in parts.query and "@" not in parts.netloc)  # the ? is part of a password
    ):
        raise ConfigurationError(
            f"{named}: write redis://[[user]:password@]host[:port][/database][?replicas=1]; in user and password, "
            "write / ? # @ : and % as %2F %3F %23 %40 %3A and %25"
        )
    violations: list[str] = []
    has_tls = parts.scheme.lower() == "rediss"
    options = url_options(parts, named, ("replicas", "durability", *(_TLS_OPTIONS if has_tls else ())), violations)
    replicas, durability = options.get("replicas", "0"), options.get("durability")
    if not replicas.isdecimal():
        violations.append(f"{named}: replicas= is a number: how many replicas must acknowledge each write")
    if durability not in {None, "accept_loss"}:
        violations.append(f"{named}: durability= can only be 'accept_loss'; without it Redis must keep its writes")
    if options.get("ssl_cert_reqs") not in {None, "required", "none"}:
        violations.append(f"{named}: ssl_cert_reqs= is 'required' (the default) or 'none'")
    violations += [
        f"{named}: {name}= does not name a file"
        for name in _TLS_OPTIONS[:3]
        if name in options and not Path(options[name]).is_file()
    ]
    refuse(violations)
    address = RedisAddress(
        host=parts.hostname,
        port=_port(parts) or 6379,
        database=int(parts.path.strip("/") or "0"),
        username=unquote(parts.username) if parts.username else None,
        password=unquote(parts.password) if parts.password else None,
        tls={name: value for name, value in options.items() if name in _TLS_OPTIONS} if has_tls else None,
    )
    return RedisLeaseStore(address, app, replicas=int(replicas), accepts_loss=durability is not None)


def _s3_store(url: str, named: str, app: str, aws: Aws | None) -> S3LeaseStore:
    parts = _split(url)
    if parts is None or parts.fragment or "@" in parts.netloc or _BUCKET.fullmatch(parts.netloc) is None:
        raise ConfigurationError(f"{named}: write s3://bucket[/prefix][?region=...][&endpoint=...]")
    violations: list[str] = []
    options = url_options(parts, named, ("region", "endpoint"), violations)
    refuse(violations)
    return S3LeaseStore(
        parts.netloc,
        unquote(parts.path).strip("/"),
        app,
        region=options.get("region"),
        endpoint_url=options.get("endpoint"),
        aws=aws,
    )


_TLS_OPTIONS: Final = ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile", "ssl_cert_reqs")
_OPTIONS: Final = ("region", "endpoint", "create_table", "replicas", "durability", *_TLS_OPTIONS)
_SHOWN_OPTION: Final = re.compile(rf"({'|'.join(_OPTIONS)})=[\w.:/%~+-]*")
_SHOWN_SCHEME: Final = re.compile(r"(dynamodb|memory|postgres(ql)?|rediss?|s3|sqlite):(//)?", re.IGNORECASE)
_NO_PORT: Final = re.compile(r"^(\w+://[^/:\[]*:)(?!\d*(/|$))[^/]*")


def url_options(parts: SplitResult, named: str, known: tuple[str, ...], violations: list[str]) -> dict[str, str]:
    """The options of a URL. Adds what is wrong with them to `violations`."""
    pairs = parse_qsl(parts.query, keep_blank_values=True)
    options = dict(pairs)
    if unknown := sorted(options.keys() - set(known)):
        *first, last = known
        # After a ? in a password, its rest looks like an option.
        what = "an option that it does not have" if "@" in parts.query else f"no option {', '.join(unknown)}"
        violations.append(f"{named} has {what}: there are {', '.join(first)} and {last}")
    if len(pairs) > len(options):
        violations.append(f"{named}: an option is given twice")
    if "region" in known and "region" in options and _REGION.fullmatch(options["region"]) is None:
        violations.append(f"{named}: region= looks like eu-west-1")
    if "endpoint" in known and "endpoint" in options and not _is_endpoint(options["endpoint"]):
        violations.append(f"{named}: endpoint= looks like http://localhost:8000, and has no user, password or path")
    return options


def _is_endpoint(url: str) -> bool:
    parts = _split(url)
    if parts is None or parts.scheme not in {"http", "https"} or not parts.hostname or "@" in parts.netloc:
        return False
    return _port(parts) != 0 and not (parts.path.strip("/") or parts.query or parts.fragment)


def sqlite_path(url: str, named: str) -> Path:
    """The file of a `sqlite:` URL. `named` is the URL in messages."""
    path = local_path(url, named)
    if path.name == ":memory:":
        raise ConfigurationError(f"{named}: name a file; only leases can be kept in memory (memory://)")
    if path.name in {"", ".."} or unquote(url).endswith(("/", "/.")):
        raise ConfigurationError(f"{named} names a folder: name a file in it")
    return path


def local_path(url: str, named: str) -> Path:
    """The path of a `sqlite:` or `file:` URL."""
    parts, scheme = _split(url), url.partition(":")[0].lower()
    if parts is None or parts.netloc or parts.query or parts.fragment or not parts.path.strip("/"):
        raise ConfigurationError(f"{named}: write {scheme}:///absolute/path (three slashes), or {scheme}:relative/path")
    path = unquote(parts.path)
    if path.lstrip("/").startswith("~"):
        raise ConfigurationError(f"{named}: ~ is not expanded; write the full path")
    if "\0" in path:
        raise ConfigurationError(f"{named}: a path cannot contain a NUL character")
    # SQLAlchemy's users write four slashes for an absolute path: both are the same file.
    return Path("/" + path.lstrip("/")) if path.startswith("/") else Path(path)


def shown_url(url: str) -> str:
    """A URL without what may be secret: user, password, and options that no lease store has. Also works for malformed
    URLs, such as `redis:user:password@host`, and leaves their mistake visible.
    """
    before, at, after = url.rpartition("@")  # a password may have an unescaped ? or @
    address, mark, query = (after if at else url).partition("?")
    if at:
        scheme = _SHOWN_SCHEME.match(before)
        shown = f"{scheme[0] if scheme else ''}…@{address}"
    else:
        shown = _NO_PORT.sub(r"\1…", address)  # there is no host: what follows the colon is a password
    if not mark:
        return shown
    options = [one if _SHOWN_OPTION.fullmatch(one) else "…" for one in query.split("&")]
    return f"{shown}?{'&'.join(options)}"


def default_store(app: str, environ: Mapping[str, str], aws: Aws | None = None) -> LeaseStore:
    """The store of an application without `leases=`: ANABRANCH_LEASES, else a file in the user's state directory."""
    if (leases := leases_from(environ)) is not None:
        try:
            return open_store(leases, app, aws)
        except ConfigurationError as error:
            raise ConfigurationError([f"{LEASES_VARIABLE}: {one}" for one in error.violations]) from None
    if (platform := container_platform(environ)) is not None:
        raise ConfigurationError(
            f"application {app!r} has no lease store, and this is {platform}, where a file "
            "inside the container is neither shared nor kept: every container would handle every record. "
            f"Choose one: leases='dynamodb://' for all its workers (or {LEASES_VARIABLE}=dynamodb://), which keeps "
            f"the leases in the DynamoDB table {DEFAULT_TABLE!r} and creates it; leases='sqlite:///path' on a "
            "volume that outlives this container, if there is only one; leases='memory://' to keep no position"
        )
    path = embedded_file(app, environ)
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise LeaseStoreInvalidError(
            f"the leases of application {app!r} would be kept in {path}, but its folder cannot be created "
            f"({error.strerror}): pass leases='sqlite:///path', or set XDG_STATE_HOME"
        ) from error
    _log.info(
        "the leases of application %r are in %s, which only processes on this machine can share; "
        "workers on several machines need a shared store (leases='dynamodb://')", app, path,
    )  # fmt: skip
    if is_ephemeral(kind := file_system(path.parent)):
        _log.warning(
            "%s is on %s: the application's position is lost when that is removed; use a persistent path", path, kind
        )
    return SqliteLeaseStore(path, app)


def container_platform(environ: Mapping[str, str]) -> str | None:
    """The container platform that this is, and how we know; None elsewhere."""
    found = [f"{platform} ({variable} is set)" for variable, platform in _PLATFORMS if environ.get(variable)]
    return found[0] if found else None


def embedded_folder(environ: Mapping[str, str]) -> Path:
    """The folder of the embedded stores; it may not exist yet. By the XDG specification, only absolute paths count."""
    state, home = environ.get("XDG_STATE_HOME", ""), environ.get("HOME", "")
    if state.startswith("/"):
        return Path(state) / "anabranch"
    return (Path(home) if home.startswith("/") else Path.home()) / ".local" / "state" / "anabranch"


def embedded_file(app: str, environ: Mapping[str, str]) -> Path:
    return embedded_folder(environ) / f"{quote(app, safe=' @+')}{EMBEDDED_SUFFIX}"
