"""The lease store on Redis: for fleets that have one already.

All rows of one kind are one hash, under keys that people can read:

    anabranch:{<app>}:app                      the application (one field)
    anabranch:{<app>}:command                  which deletions have not ended
    anabranch:{<app>}:<app_id>:<kind>          its members, statuses, streams, leases and commands

A change reads rows, computes the new ones, and writes them with one script, which does nothing if a row is no longer
what was read (rule R2). Every answer has the run id and the replication id of the server that gave it. So a restart, a
fail-over and a replica that became the primary are noticed with the next answer (rule L13).

It decides nothing about leases, and has no clock. Each request is sent once.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple, cast
from urllib.parse import quote, unquote

from anabranch._event_loops import PerLoop
from anabranch._model.leases import AppRow
from anabranch.errors import ConfigurationError, LeaseError, LeaseStoreError, LeaseStoreInvalidError
from anabranch.stores.row_codec import decode_row, encode_row
from anabranch.stores.row_store import Changed, Found, Row, RowKey, RowLeaseStore, Scope, Update

if TYPE_CHECKING:
    from redis.asyncio import Connection

_PREFIX: Final = "anabranch:"
_CLOSE_SECONDS_MAX: Final = 1.0
_CALL_SECONDS_MAX: Final = 10.0
"""For callers without a deadline of their own; a worker's is much shorter."""
_WAIT_MS: Final = 1_000
"""How long replicas may take to acknowledge a write: less than the deadline of a call with the default expiry."""
_SCANNED_TOGETHER: Final = 1_000

_IDENTITY: Final = """
local function info(section, name)
  return string.match(redis.call('INFO', section), name .. ':(%w+)') or ''
end
local answer = {info('server', 'run_id'), info('replication', 'master_replid'), info('replication', 'role')}
"""
_READ: Final = (
    _IDENTITY
    + """
for i, key in ipairs(KEYS) do
  local field = ARGV[i]
  answer[#answer + 1] = field == '' and redis.call('HVALS', key) or redis.call('HGET', key, field) or ''
end
return answer
"""
)
"""With an empty field, all rows of the hash."""
_CHANGE: Final = (
    _IDENTITY
    + """
local unchanged = 1
for i, key in ipairs(KEYS) do
  if (redis.call('HGET', key, ARGV[3 * i - 2]) or '') ~= ARGV[3 * i - 1] then unchanged = 0 end
end
answer[#answer + 1] = unchanged
if unchanged == 1 then
  for i, key in ipairs(KEYS) do
    local field, row = ARGV[3 * i - 2], ARGV[3 * i]
    if row ~= '' then redis.call('HSET', key, field, row) else redis.call('HDEL', key, field) end
  end
end
return answer
"""
)
"""For each key: the field, the row that was read and the row to write; empty stands for no row."""


class RedisAddress(NamedTuple):
    """Where the server is, and how to log in. Its text has no secret."""

    host: str
    port: int = 6379
    database: int = 0
    username: str | None = None
    password: str | None = None
    tls: Mapping[str, Any] | None = None
    """None: no TLS. Else options of redis-py: `ssl_ca_certs`, `ssl_certfile`, `ssl_keyfile`, `ssl_cert_reqs`."""

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'redis' if self.tls is None else 'rediss'}://{host}:{self.port}/{self.database}"

    def __repr__(self) -> str:
        return str(self)


class RedisServer(NamedTuple):
    """What a server says about itself."""

    version: str
    replicas: int
    appendonly: str | None
    """None if CONFIG GET is not allowed."""
    appendfsync: str | None
    maxmemory_policy: str | None

    def losses(self) -> list[str]:
        """Why acknowledged writes could be lost."""
        if self.appendonly is None or self.maxmemory_policy is None:
            return ["it is unknown whether it keeps acknowledged writes (CONFIG GET is not allowed)"]
        found = []
        if self.appendonly != "yes":
            found.append(f"appendonly is {self.appendonly!r}, so a restart loses writes (it must be 'yes')")
        if self.maxmemory_policy != "noeviction":
            found.append(
                f"maxmemory-policy is {self.maxmemory_policy!r}, so rows are evicted when memory is short (it must be "
                "'noeviction')"
            )
        return found


class _Link:
    """One connection, for one event loop. It sends one request at a time; a cancelled request closes it."""

    def __init__(self, connection: "Connection") -> None:
        self._connection = connection
        self._connecting: asyncio.Task[None] | None = None
        self._turn = asyncio.Lock()

    async def send(self, *commands: Sequence[Any]) -> list[Any]:
        """Sends the commands together. Error responses are returned in the list."""
        connection = self._connection
        async with self._turn:
            await self._connect()
            try:
                await connection.send_packed_command(connection.pack_commands(commands), check_health=False)
                return [await self._answer() for _ in commands]
            except BaseException:
                # Also after a cancellation: the next request would read this one's response.
                await connection.disconnect(nowait=True)
                raise

    async def _connect(self) -> None:
        """Continues if its caller is cancelled: the deadline of one call may be too short to connect and to send."""
        if self._connecting is None and not self._connection.is_connected:
            connect = cast("Any", self._connection).connect()
            self._connecting = asyncio.get_running_loop().create_task(connect, name="connect to Redis")
        if (connecting := self._connecting) is not None:
            await asyncio.wait([connecting])
            self._connecting = None
            await connecting

    async def _answer(self) -> Any:
        from redis.exceptions import ResponseError  # noqa: PLC0415 -- an extra

        try:
            return await self._connection.read_response()
        except ResponseError as error:
            return error

    async def close(self) -> None:
        from redis.exceptions import RedisError  # noqa: PLC0415 -- an extra

        if (connecting := self._connecting) is not None:
            connecting.cancel()
            await asyncio.gather(connecting, return_exceptions=True)
        # TLS closes with a handshake: do not wait for a server that does not respond.
        with contextlib.suppress(TimeoutError, RedisError):
            async with asyncio.timeout(_CLOSE_SECONDS_MAX):
                await self._connection.disconnect()


class _Links(PerLoop[_Link]):
    def __init__(self, address: RedisAddress) -> None:
        super().__init__()
        self._address = address

    async def open_client(self) -> _Link:
        from redis.asyncio import Connection, SSLConnection  # noqa: PLC0415 -- an extra
        from redis.asyncio.retry import Retry  # noqa: PLC0415 -- as above
        from redis.backoff import NoBackoff  # noqa: PLC0415 -- as above

        address = self._address
        options: dict[str, Any] = {
            "host": address.host,
            "port": address.port,
            "db": address.database,
            "username": address.username,
            "password": address.password,
            "protocol": 2,
            "retry": Retry(NoBackoff(), 0),
            "socket_timeout": None,  # the caller has a deadline
            "socket_connect_timeout": _CALL_SECONDS_MAX,
            "socket_keepalive": True,
        }
        if address.tls is None:
            return _Link(Connection(**options))
        checks_name = address.tls.get("ssl_cert_reqs") != "none"
        return _Link(SSLConnection(**options, ssl_check_hostname=checks_name, **address.tls))


class RedisLeaseStore(RowLeaseStore):
    """`replicas`: how many must acknowledge each write. `accepts_loss`: use a server even if it may lose writes."""

    def __init__(self, address: RedisAddress, app: str, *, replicas: int = 0, accepts_loss: bool = False) -> None:
        super().__init__(app)
        try:
            import redis.asyncio  # noqa: F401, PLC0415 -- an extra
        except ImportError:
            raise ConfigurationError(
                "leases='redis://...' needs the package `redis`: pip install 'anabranch[redis]'"
            ) from None
        self.address = address
        self.replicas = replicas
        self.accepts_loss = accepts_loss
        self._links = _Links(address)
        self._last: dict[RowKey, bytes] = {}
        """The rows that this handle wrote last, as bytes."""

    def __str__(self) -> str:
        return str(self.address)

    def __repr__(self) -> str:
        return f"RedisLeaseStore({self.address}, {self.app!r})"

    async def open(self, app: AppRow) -> AppRow:
        try:
            if not self.accepts_loss and (losses := (await self.server()).losses()):
                raise LeaseStoreInvalidError(
                    f"Redis at {self}: {'; '.join(losses)}",
                    code="not_durable",
                    advice="change that, or write ?durability=accept_loss in its URL; then records may be handled "
                    "again, or by two workers at once, after Redis has lost rows",
                )
            return await super().open(app)
        except LeaseStoreError as error:
            if error.code == "access_denied":  # at a start, waiting does not help
                raise LeaseStoreInvalidError(str(error), code=error.code) from error
            raise

    # the primitives

    async def identity(self) -> str:
        _, evidence = await self._run(_READ, [], [])
        return evidence

    async def get(self, keys: Sequence[RowKey]) -> Found:
        answers, evidence = await self._run(_READ, [_hash(key) for key in keys], [_field(key) for key in keys])
        return Found([self._row(key.kind, data) for key, data in zip(keys, answers, strict=True)], evidence)

    async def scan(self, scopes: Sequence[Scope]) -> Found:
        answers, evidence = await self._run(_READ, [_hash(scope) for scope in scopes], [""] * len(scopes))
        rows = [
            (scope, self._row(scope.kind, data)) for scope, one in zip(scopes, answers, strict=True) for data in one
        ]
        return Found([row for scope, row in rows if row is not None and scope.includes(row)], evidence)

    async def change(self, keys: Sequence[RowKey], update: Update) -> Changed:
        hashes, fields = [_hash(key) for key in keys], [_field(key) for key in keys]
        # Most rows are changed by one worker only, so they are as it wrote them last. The script checks that.
        written: list[bytes] | None = [self._last.pop(key, b"") for key in keys]
        stored = written if written and all(written) else None
        async with _deadline(self):
            while True:
                is_read, evidence = stored is None, ""
                if stored is None:
                    stored, evidence = await self._run(_READ, hashes, fields)
                before = [self._row(key.kind, data) for key, data in zip(keys, stored, strict=True)]
                after = update(before)
                unchanged = [new is old for new, old in zip(after, before, strict=True)]
                # With replicas, an unchanged row is written as well: what is reported here must be on them, too.
                if all(unchanged) and is_read and not self.replicas:
                    return Changed(before, after, evidence)
                written = [
                    data if same else b"" if row is None else encode_row(row)
                    for data, row, same in zip(stored, after, unchanged, strict=True)
                ]
                arguments = [part for one in zip(fields, stored, written, strict=True) for part in one]
                (is_written,), evidence = await self._run(_CHANGE, hashes, arguments, replicas=self.replicas)
                if is_written:
                    self._last.update((key, data) for key, data in zip(keys, written, strict=True) if data)
                    return Changed(before, after, evidence)
                stored = None

    async def close(self) -> None:
        await self._links.close()

    # beyond the port

    async def applications(self) -> list[str]:
        """Scans all keys of the database, so only the command line uses it."""
        names, cursor = [], b"0"
        while True:
            (page,) = await self._send(("SCAN", cursor, "MATCH", f"{_PREFIX}{{*}}:app", "COUNT", _SCANNED_TOGETHER))
            cursor = page[0]
            names += [unquote(key.decode()[len(_PREFIX) + 1 : -len("}:app")]) for key in page[1]]
            if cursor == b"0":
                return sorted(set(names))

    async def server(self) -> RedisServer:
        sections = await self._send(("INFO", "server"), ("INFO", "replication"))
        names = ("appendonly", "appendfsync", "maxmemory-policy")  # one each: older servers take no list
        answers = await self._send(*(("CONFIG", "GET", name) for name in names), errors_allowed=True)
        lines = b"".join(sections).decode().splitlines()
        info = dict(line.split(":", 1) for line in lines if ":" in line)
        return RedisServer(
            info.get("redis_version", "unknown"), int(info.get("connected_slaves", "0")), *map(_setting, answers)
        )

    # requests

    async def _run(
        self, script: str, keys: Sequence[str], arguments: Sequence[str | bytes], *, replicas: int = 0
    ) -> tuple[list[Any], str]:
        """Returns the result of the script and the identity of the server. With `replicas`, it also waits until so many
        have acknowledged the write. WAIT counts only the writes of its own connection, so both are sent together.
        """
        commands: list[Sequence[Any]] = [("EVAL", script, len(keys), *keys, *arguments)]
        if replicas:
            commands.append(("WAIT", replicas, _WAIT_MS))
        answers = await self._send(*commands)
        run_id, replication_id, role, *found = answers[0]
        if role != b"master":
            raise LeaseStoreError(f"Redis at {self} is a {role.decode() or 'server without a role'}, not the primary")
        if not run_id or not replication_id:
            raise LeaseStoreInvalidError(
                f"Redis at {self} does not report its run id and replication id (INFO server, INFO replication), so a "
                "fail-over could not be noticed"
            )
        if replicas and answers[1] < replicas:
            raise LeaseStoreError(
                f"Redis at {self}: {answers[1]} of {replicas} replicas acknowledged a write within {_WAIT_MS} ms"
            )
        return found, f"{run_id.decode()} {replication_id.decode()}"

    async def _send(self, *commands: Sequence[Any], errors_allowed: bool = False) -> list[Any]:
        from redis.exceptions import RedisError  # noqa: PLC0415 -- an extra

        try:
            async with _deadline(self):
                link = await self._links.get()
                answers = await link.send(*commands)
        except (RedisError, OSError) as error:
            raise _store_error(self, error) from None  # the cause may name the user
        refused = next((answer for answer in answers if isinstance(answer, Exception)), None)
        if refused is not None and not errors_allowed:
            raise _store_error(self, refused)
        return answers

    def _row(self, kind: Any, data: bytes) -> Row | None:
        if not data:
            return None
        try:
            return decode_row(kind, data)
        except ValueError as error:
            raise LeaseStoreInvalidError(
                f"Redis at {self} has a row of application {self.app!r} that cannot be read ({error})"
            ) from error


@contextlib.asynccontextmanager
async def _deadline(store: RedisLeaseStore) -> AsyncIterator[None]:
    try:
        async with asyncio.timeout(_CALL_SECONDS_MAX):
            yield
    except TimeoutError:
        raise LeaseStoreError(f"Redis at {store} gave no answer within {_CALL_SECONDS_MAX:.0f} s") from None


def _hash(place: RowKey | Scope) -> str:
    """The name in braces keeps the keys of an application on one node of a cluster."""
    app_id = f"{place.app_id}:" if place.app_id else ""
    return f"{_PREFIX}{{{quote(place.app, safe=' @+')}}}:{app_id}{place.kind}"


def _field(key: RowKey) -> str:
    return " ".join(str(part) for part in key.name) or "row"


def _setting(answer: Any) -> str | None:
    """Of CONFIG GET. None: it is not allowed, or the server does not know the setting."""
    return str(answer[1].decode()) if isinstance(answer, list) and len(answer) == 2 else None


# Reasons


def _store_error(store: RedisLeaseStore, error: Exception) -> LeaseError:
    from redis import exceptions  # noqa: PLC0415 -- an extra

    what, said = f"Redis at {store}", str(error)
    if isinstance(error, exceptions.AuthenticationError | exceptions.NoPermissionError):
        return LeaseStoreError(
            f"{what}: access denied ({said})",
            code="access_denied",
            advice="check the user and password in the URL, and compare its rights with those in the documentation",
        )
    if isinstance(error, exceptions.AskError | exceptions.ClusterCrossSlotError):
        return LeaseStoreInvalidError(
            f"{what} is a node of a Redis Cluster ({said})", advice="name a server that is not in cluster mode"
        )
    if "DB index" in said:
        return LeaseStoreInvalidError(
            f"{what} has no database {store.address.database} ({said})", advice="name one of its databases, such as /0"
        )
    if "WRONGTYPE" in said:
        return LeaseStoreInvalidError(
            f"{what} has a key of another type ({said}) where rows of application {store.app!r} belong",
            advice=f"another program has written it: look at the keys {_PREFIX}*, or use another database",
        )
    if "unknown command" in said:
        return LeaseStoreInvalidError(
            f"{what} does not know a command ({said})", advice="name a Redis server, not a Sentinel or a proxy"
        )
    if isinstance(error, exceptions.OutOfMemoryError):
        return LeaseStoreError(f"{what} is full ({said})", advice="give it more memory")
    if "CERTIFICATE_VERIFY_FAILED" in said:
        return LeaseStoreInvalidError(
            f"{what}: its certificate is not trusted ({said})", advice="name its CA with ?ssl_ca_certs=/path/ca.pem"
        )
    if isinstance(error, exceptions.ResponseError):  # for example NOREPLICAS or BUSY: it may pass
        return LeaseStoreError(f"{what} answered with an error ({said})")
    return LeaseStoreError(f"{what} gave no answer ({said})")
