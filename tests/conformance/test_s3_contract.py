"""The S3 store passes the part of the contract of lease stores that one worker needs, before it joins and after."""

import pytest

from anabranch.config import Aws
from anabranch.stores.s3 import S3LeaseStore
from anabranch.testing.lease_store_contract import check_lease_store, member

from services import MotoServer


@pytest.fixture(scope="module")
def server():
    with MotoServer() as server:
        server.make_bucket("leases")
        yield server


@pytest.fixture(scope="module")
def aws():
    import boto3

    return Aws(session=boto3.Session("x", "y", region_name="eu-west-1"))  # one for all stores: making one takes long


def test_the_store_keeps_the_contract_of_one_worker(server, aws):
    def make(app):
        return S3LeaseStore("leases", "some/where", app, endpoint_url=server.url, aws=aws)

    check_lease_store(make, single_worker=True, slow=server.stopped)


class JoinedStore(S3LeaseStore):
    """Has joined before anything else is done with an application."""

    async def open(self, app):
        is_first = await self.read_app() is None
        row = await super().open(app)
        if is_first and self._joined is None:
            await super().register_member(member("before"))
            for kind in ("member", "status"):
                self._rows.places.pop((kind, self.app, row.app_id), None)
        return row


def test_a_worker_that_has_joined_keeps_the_contract(server, aws):
    check_lease_store(
        lambda app: JoinedStore("leases", "joined", app, endpoint_url=server.url, aws=aws), single_worker=True
    )


class ForgetfulStore(JoinedStore):
    """Does not save at the end."""

    async def close(self):
        self._has_unsaved = False
        await super().close()


def test_the_contract_notices_a_store_that_does_not_save_at_the_end(server, aws):
    with pytest.raises(ExceptionGroup, match="of the lease store contract do not hold"):
        check_lease_store(
            lambda app: ForgetfulStore("leases", "forgotten", app, endpoint_url=server.url, aws=aws), single_worker=True
        )
