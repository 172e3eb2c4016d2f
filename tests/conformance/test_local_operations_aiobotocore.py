"""Every operation of the API once more, driven by aiobotocore: another HTTP stack in front of the same stories."""

import asyncio

import aiobotocore.session
import pytest
from botocore.config import Config
from test_local_operations_boto3 import METHODS, NAME, SCENARIOS


class BlockingClient:
    """boto3's face on an aiobotocore client, so that both can be told the same story."""

    def __init__(self, runner, server):
        self._runner = runner
        self._context = aiobotocore.session.get_session().create_client(
            "kinesis",
            region_name="us-east-1",
            endpoint_url=server.endpoint_url,
            verify=server.certificate,
            aws_access_key_id="local",
            aws_secret_access_key="local",
            config=Config(retries={"total_max_attempts": 1}, read_timeout=10),
        )
        self._client = runner.run(self._context.__aenter__())

    def __getattr__(self, method):
        def call(**request):
            answer = self._runner.run(getattr(self._client, method)(**request))
            if "EventStream" in answer:
                answer["EventStream"] = BlockingEvents(self._runner, answer["EventStream"])
            return answer

        return call

    def close(self):
        self._runner.run(self._context.__aexit__(None, None, None))


class BlockingEvents:
    def __init__(self, runner, events):
        self._runner = runner
        self._events = events
        self._iterator = aiter(events)

    def __iter__(self):
        return self

    def __next__(self):
        async def following():
            return await anext(self._iterator, None)

        event = self._runner.run(following())
        if event is None:
            raise StopIteration
        return event

    def close(self):
        self._events.close()


@pytest.fixture(scope="module")
def runner():
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture(scope="module")
def clients(runner, goodbyes):
    made = {}
    yield made
    for client in made.values():
        client.close()
    runner.run(goodbyes())


@pytest.mark.filterwarnings("ignore:Sending a large body:ResourceWarning")  # aiohttp's advice to aiobotocore
@pytest.mark.parametrize("method", METHODS)
def test_the_operation_works_with_aiobotocore(kinesis, runner, clients, method):
    if kinesis not in clients:
        clients[kinesis] = BlockingClient(runner, kinesis)
    client = clients[kinesis]
    client.create_stream(StreamName=NAME, ShardCount=2)
    SCENARIOS[method](client)
