"""The Redis store on a real server: what it demands of it, what it notices, and that it tells no secret."""

import asyncio
import builtins
import logging
from datetime import UTC, datetime

import pytest

from anabranch._model.leases import AppRow, HeartbeatWrite, MemberRow
from anabranch.errors import ConfigurationError, LeaseStoreError, LeaseStoreInvalidError
from anabranch.local.server import write_self_signed_certificate
from anabranch.stores.redis import RedisAddress, RedisLeaseStore
from anabranch.stores.urls import open_store
from network_proxy import NetworkProxy

from services import RedisServerProcess, free_port, redis_pair

pytestmark = pytest.mark.services

APP = AppRow(app="billing", app_id="first", created_wall_ms=0)
RIGHTS = ["+eval", "+hget", "+hset", "+hdel", "+hvals", "+info", "+wait", "+scan", "+select", "+config|get"]


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with RedisServerProcess(tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest.fixture(autouse=True)
def _empty(request):
    if "server" in request.fixturenames:
        request.getfixturevalue("server").call("FLUSHALL")


def using(url, work, app="billing"):
    async def main():
        store = open_store(url, app)
        try:
            return await work(store)
        finally:
            await store.close()

    return asyncio.run(main())


def opened(url):
    return using(url, lambda store: store.open(APP))


# durability


@pytest.mark.parametrize(
    "settings, words",
    [
        (["--appendonly", "no"], "appendonly is 'no', so a restart loses writes"),
        (["--maxmemory-policy", "allkeys-lru"], "maxmemory-policy is 'allkeys-lru', so rows are evicted"),
        (["--rename-command", "CONFIG", ""], "it is unknown whether it keeps acknowledged writes"),
    ],
)
def test_a_server_that_may_lose_rows_is_refused_unless_the_loss_is_accepted(tmp_path, settings, words):
    with RedisServerProcess(tmp_path, *settings) as server:
        with pytest.raises(LeaseStoreInvalidError, match=words) as caught:
            opened(server.leases())
        assert caught.value.code == "not_durable"
        assert "?durability=accept_loss" in str(caught.value)
        assert server.call("KEYS", "*") == []
        assert opened(server.leases("?durability=accept_loss")).app_id == "first"


# the storage's identity


def test_a_restart_and_a_promotion_are_another_storage(tmp_path):
    async def identities(store):
        return [await store.identity(), (await store.scan([])).evidence, (await store.read_leases()).evidence]

    async def opened_identities(store):
        await store.open(APP)
        return await identities(store)

    with redis_pair(tmp_path) as (primary, replica):
        (before, *same) = using(primary.leases(), opened_identities)
        assert same == [before, before]
        replica.call("REPLICAOF", "NO", "ONE")
        promoted = using(replica.leases(), opened_identities)[0]
        primary.kill()
        primary.start()
        restarted = using(primary.leases(), opened_identities)[0]
        assert len({before, promoted, restarted}) == 3
        assert using(primary.leases(), lambda store: store.read_app()).incarnation == before


def test_responses_of_a_replica_are_rejected(tmp_path):
    with redis_pair(tmp_path) as (_, replica), pytest.raises(LeaseStoreError, match="is a slave, not the primary"):
        using(replica.leases(), lambda store: store.read_app())


# replicas that acknowledge


def test_a_write_that_no_replica_acknowledges_has_no_answer_also_if_it_is_repeated(tmp_path):
    """The row is there after the first try, so the second changes nothing. It must not be believed all the same: the
    replica may become the primary.
    """

    async def work(store):
        await store.open(APP)
        await store.register_member(MemberRow(member_id="a", expiry_ms=10_000))
        with replica.stopped():
            for _ in range(2):
                with pytest.raises(LeaseStoreError, match="0 of 1 replicas acknowledged a write within 1000 ms"):
                    await store.register_member(MemberRow(member_id="b", expiry_ms=10_000))
                await store._links.close()  # the next try has another connection
            assert [row.member_id for row in (await store.poll()).members] == ["a", "b"]
        answer = await store.heartbeat(HeartbeatWrite(member_id="b", attempt=1))
        assert answer.row.counter == 1

    with redis_pair(tmp_path) as (primary, replica):
        using(primary.leases("?replicas=1"), work)


def test_a_number_of_replicas_that_there_are_not_is_no_answer(server):
    with pytest.raises(LeaseStoreError, match="0 of 2 replicas"):
        opened(server.leases("?replicas=2"))


# cancellation


def test_a_call_that_is_cancelled_at_any_moment_leaves_no_answer_for_the_next(server):
    async def work(store):
        await store.open(APP)
        for number in range(60):
            await store.register_member(MemberRow(member_id=f"m{number}", expiry_ms=10_000))
            call = asyncio.ensure_future(store.heartbeat(HeartbeatWrite(member_id=f"m{number}", attempt=7)))
            for _ in range(number % 20):
                await asyncio.sleep(0)
            call.cancel()
            await asyncio.gather(call, return_exceptions=True)
            row = await store.leave(f"m{number}")
            assert (row.member_id, row.state) == (f"m{number}", "left")

    using(server.leases(), work)


def test_calls_that_wait_for_a_slow_one_are_not_lost_with_it(server):
    async def work(store):
        await store.open(APP)
        with server.stopped():
            calls = [asyncio.ensure_future(store.read_app()) for _ in range(3)]
            await asyncio.sleep(0.05)
            calls[0].cancel()
            await asyncio.gather(calls[0], return_exceptions=True)
        assert [row.app_id for row in await asyncio.gather(*calls[1:])] == ["first", "first"]

    using(server.leases(), work)


def test_a_deadline_that_is_too_short_for_a_connection_and_a_request_is_enough_for_the_next_call(server):
    async def main():
        proxy = await NetworkProxy(server.port).start()
        proxy.delay_seconds = 0.1
        store = open_store(server.leases(user="slow:secret@", port=proxy.port), "billing")
        outcomes = []
        for _ in range(6):
            try:
                async with asyncio.timeout(0.35):
                    outcomes.append(await store.read_app())
            except TimeoutError:
                outcomes.append("too late")
        await store.close()
        await proxy.close()
        assert (outcomes[0], outcomes[-1]) == ("too late", None)

    server.call("ACL", "SETUSER", "slow", "on", ">secret", "~*", "+@all")
    asyncio.run(main())


def test_a_store_that_is_closed_while_it_connects_leaves_nothing_behind(server):
    async def main():
        proxy = await NetworkProxy(server.port).start()
        proxy.cut()
        store = open_store(server.leases(port=proxy.port), "billing")
        for _ in range(2):
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.05):
                    await store.read_app()
        await store.close()
        await proxy.close()

    asyncio.run(main())


# access


def test_a_user_needs_few_rights_on_few_keys(server):
    server.call("ACL", "SETUSER", "fleet", "reset", "on", ">p@ss:w/rd?", "~anabranch:*", *RIGHTS)

    async def work(store):
        await store.open(APP)
        await store.register_member(MemberRow(member_id="a", expiry_ms=10_000))
        assert await store.applications() == ["billing"]
        assert await store.delete_app("first")

    using(server.leases(user="fleet:p%40ss%3Aw%2Frd%3F@"), work)


@pytest.mark.parametrize(
    "rights, words", [(["+@all", "resetkeys"], "no permissions to access one of the keys"), (["-eval", "~*"], "eval")]
)
def test_a_missing_right_is_named_and_ends_a_start(server, rights, words):
    server.call("ACL", "SETUSER", "guest", "reset", "on", ">secret", *RIGHTS, *rights)
    with pytest.raises(LeaseStoreInvalidError, match=words) as caught:
        opened(server.leases(user="guest:secret@"))
    assert caught.value.code == "access_denied"
    assert "secret" not in str(caught.value)


def test_no_secret_is_shown(server, caplog):
    caplog.set_level(logging.DEBUG)
    url = server.leases("?durability=accept_loss", user="somebody:secret@")
    with pytest.raises(LeaseStoreInvalidError, match="access denied") as caught:
        opened(url)
    store = open_store(url, "billing")
    told = [str(caught.value), repr(caught.value), str(store), repr(store), repr(store.address), str(store.address)]
    error = caught.value.__cause__
    while error is not None:
        told.append(f"{error!r} {error}")
        error = error.__cause__ or error.__context__
    assert "secret" not in " ".join(told) + caplog.text
    assert "somebody" not in str(store)


def test_a_server_that_is_not_there_is_no_answer(tmp_path):
    server = RedisServerProcess(tmp_path)
    with pytest.raises(LeaseStoreError, match=r"Redis at redis://127\.0\.0\.1:\d+/0 gave no answer"):
        opened(server.leases())


def test_a_full_server_says_so(tmp_path):
    with RedisServerProcess(tmp_path, "--maxmemory", "1") as server, pytest.raises(LeaseStoreError, match="is full"):
        opened(server.leases())


def test_a_row_that_is_no_row_is_named(server):
    opened(server.leases())
    server.call("HSET", "anabranch:{billing}:app", "row", "nonsense")
    with pytest.raises(LeaseStoreInvalidError, match="has a row of application 'billing' that cannot be read"):
        opened(server.leases())


def test_a_database_that_there_is_not_ends_a_start(server):
    with pytest.raises(LeaseStoreInvalidError, match=r"has no database 99 \(.*\): name one of its databases"):
        opened(server.leases().replace("/0", "/99"))


def test_a_key_of_another_program_ends_a_start(server):
    server.call("SET", "anabranch:{billing}:app", "mine")
    with pytest.raises(LeaseStoreInvalidError, match=r"has a key of another type .* where rows of .*'billing' belong"):
        opened(server.leases())


def test_an_error_that_may_pass_is_quoted_and_tried_again(server):
    server.call("CONFIG", "SET", "min-replicas-to-write", "1")
    try:
        with pytest.raises(LeaseStoreError, match=r"answered with an error \(NOREPLICAS"):
            opened(server.leases())
    finally:
        server.call("CONFIG", "SET", "min-replicas-to-write", "0")


# TLS


@pytest.fixture(scope="module")
def tls(tmp_path_factory):
    """A server that also listens with TLS, its certificate and that port."""
    folder, port = tmp_path_factory.mktemp("tls"), free_port()
    certificate, key = write_self_signed_certificate(folder, "127.0.0.1", datetime.now(UTC))
    files = ["--tls-cert-file", str(certificate), "--tls-key-file", str(key), "--tls-auth-clients", "no"]
    with RedisServerProcess(folder / "redis", "--tls-port", str(port), *files):
        yield certificate, key, port


def test_a_connection_with_tls_takes_its_settings_from_the_url(tls):
    certificate, key, port = tls
    options = f"?ssl_ca_certs={certificate}&ssl_certfile={certificate}&ssl_keyfile={key}"
    assert opened(f"rediss://127.0.0.1:{port}/0{options}").app_id == "first"


def test_a_certificate_that_is_not_trusted_says_how_to_name_its_ca(tls):
    certificate, key, port = tls
    with pytest.raises(LeaseStoreInvalidError, match=r"its certificate is not trusted .* \?ssl_ca_certs=/path/ca\.pem"):
        opened(f"rediss://127.0.0.1:{port}/0?ssl_certfile={certificate}&ssl_keyfile={key}")
    assert opened(f"rediss://127.0.0.1:{port}/0?ssl_certfile={certificate}&ssl_keyfile={key}&ssl_cert_reqs=none")


def test_a_certificate_that_cannot_be_read_is_named(tls):
    with pytest.raises(ConfigurationError, match=r"ssl_ca_certs=/nowhere\.pem': ssl_ca_certs= does not name a file"):
        opened(f"rediss://127.0.0.1:{tls[2]}/0?ssl_ca_certs=/nowhere.pem")


# the extra


def test_without_the_package_the_error_has_the_line_to_install(monkeypatch):
    found = builtins.__import__

    def without_redis(name, *rest):
        if name.partition(".")[0] == "redis":
            raise ImportError(name)
        return found(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without_redis)
    with pytest.raises(ConfigurationError, match=r"pip install 'anabranch\[redis\]'"):
        RedisLeaseStore(RedisAddress("localhost"), "billing")
