"""The Redis store passes the contract of lease stores, alone and with a replica; and the contract notices each part of
its script that is left out.
"""

import pytest

from anabranch.stores import redis
from anabranch.stores.urls import open_store
from anabranch.testing.lease_store_contract import check_lease_store

from services import RedisServerProcess, redis_pair

pytestmark = pytest.mark.services


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with RedisServerProcess(tmp_path_factory.mktemp("redis")) as server:
        yield server


def snapshot_of(server):
    def hashes():
        return {key: server.call("HGETALL", key) for key in server.call("KEYS", "*")}

    def snapshot():
        kept = hashes()

        def roll_back():
            server.call("FLUSHALL")
            for key, rows in kept.items():
                server.call("HSET", key, *(part for row in rows.items() for part in row))

        return roll_back

    return snapshot


def test_the_store_keeps_the_contract(server):
    check_lease_store(lambda app: open_store(server.leases(), app), slow=server.stopped, snapshot=snapshot_of(server))


def test_the_store_keeps_the_contract_with_a_replica_that_acknowledges(tmp_path):
    with redis_pair(tmp_path) as (primary, replica):
        # A replica that is stopped acknowledges nothing: then a write has no answer.
        check_lease_store(
            lambda app: open_store(primary.leases("?replicas=1"), app),
            slow=replica.stopped,
            snapshot=snapshot_of(primary),
        )


@pytest.mark.parametrize(
    "part, instead",
    [
        ("then unchanged = 0", "then unchanged = 1"),  # last write wins
        ("redis.call('HDEL', key, field)", "redis.call('PING')"),  # nothing is deleted
        ("redis.call('HGET', key, ARGV[3 * i - 2]) or ''", "ARGV[3 * i - 1]"),  # what is stored is not looked at
    ],
)
def test_the_contract_notices_a_part_of_the_script_that_is_left_out(server, monkeypatch, part, instead):
    assert part in redis._CHANGE
    monkeypatch.setattr(redis, "_CHANGE", redis._CHANGE.replace(part, instead))
    with pytest.raises(ExceptionGroup, match="of the lease store contract do not hold"):
        check_lease_store(lambda app: open_store(server.leases(), app))
