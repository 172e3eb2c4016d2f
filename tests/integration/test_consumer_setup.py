"""Wrong regions, credentials, endpoints and lease files: each a clear error that names what is wrong."""

import asyncio
from dataclasses import replace

import pytest

from anabranch import Aws, Consumer, errors
from anabranch._engine import shard_discovery
from patience import PATIENCE

from stream_world import QUICK, Credentials, run, stream_world


def _consume(consumer):
    async def main():
        async with asyncio.timeout(PATIENCE), consumer:
            async for _ in consumer:
                pass

    asyncio.run(main())


def test_a_missing_region_reads_like_advice():
    with pytest.raises(errors.CredentialsError, match="region"):
        _consume(Consumer("orders"))


FAR_AWAY = "arn:aws:kinesis:eu-west-1:123456789012:stream/payments"


@pytest.mark.parametrize("streams", [["orders", FAR_AWAY], [FAR_AWAY, FAR_AWAY.replace("eu-west-1", "us-east-1")]])
def test_streams_of_two_regions_are_refused_with_both_named(streams):
    aws = Aws(region="us-east-1", endpoint_url="http://127.0.0.1:9", credentials=Credentials())
    with pytest.raises(errors.ConfigurationError, match=r"must be in one region, not .*eu-west-1.* in us-east-1"):
        _consume(Consumer(streams, aws=aws))


def test_a_region_of_the_environment_counts_for_streams_given_by_name(monkeypatch):
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    with pytest.raises(errors.ConfigurationError, match=r"payments in eu-west-1, orders in us-east-1"):
        _consume(Consumer(["orders", FAR_AWAY], aws=Aws(endpoint_url="http://127.0.0.1:9", credentials=Credentials())))


@pytest.mark.parametrize(
    "streams, region",
    [
        ([FAR_AWAY], "us-east-1"),  # an ARN says more than the configuration
        (["orders", FAR_AWAY], "eu-west-1"),
        (["orders", FAR_AWAY], None),  # nothing else names a region: the stream beside the ARN is where that one is
    ],
)
def test_streams_of_one_region_are_looked_for_there(streams, region, monkeypatch):
    monkeypatch.setattr(shard_discovery, "RETRY_FOR_MS", 0)
    aws = Aws(region=region, endpoint_url="http://127.0.0.1:9", credentials=Credentials())
    with pytest.raises(errors.TransportError, match=r"127\.0\.0\.1:9"):
        _consume(Consumer(streams, aws=aws))


def test_missing_credentials_read_like_advice():
    with pytest.raises(errors.CredentialsError, match="credentials"):
        _consume(Consumer("orders", aws=Aws(region="us-east-1", endpoint_url="http://127.0.0.1:9")))


def test_a_lease_file_that_is_no_database_is_named(tmp_path):
    path = tmp_path / "leases.db"
    path.write_text("these are no leases, but a text of some length that SQLite cannot read as a database\n" * 20)

    async def main():
        async with stream_world(1) as world:
            async with world.consumer(app="billing", leases=f"sqlite:///{path}") as consumer:
                with pytest.raises(errors.LeaseStoreInvalidError, match=r"leases\.db"):
                    async for _ in consumer:
                        pass
            assert path.read_text().startswith("these are no leases")

    run(main)


def test_an_application_that_is_not_there_is_made_only_where_that_was_not_forbidden(tmp_path):
    path = tmp_path / "leases.db"
    never = replace(QUICK, leases=replace(QUICK.leases, create="never"))

    async def main():
        async with stream_world(1) as world:
            options = {"app": "billing", "leases": f"sqlite:///{path}", "until": "tip"}
            advice = rf"no application 'billing' in sqlite://{path}, and LeaseSettings\(create='never'\) creates none"
            with pytest.raises(errors.LeaseStoreInvalidError, match=advice):
                await world.consumer(**options, settings=never).run(lambda record: None, handle_signals=False)
            assert not path.exists()
            world.put("abc")
            handled = []
            await world.consumer(**options).run(handled.append, handle_signals=False)
            await world.consumer(**options, settings=never).run(handled.append, handle_signals=False)
            assert len(handled) == 3

    run(main)
