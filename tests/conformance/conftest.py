"""A local Kinesis for blocking clients: it runs in a thread with an event loop of its own, plain or with TLS.

`kinesis` is one server of each kind for the whole session, made empty for each test; `kinesis.boto3` is a client of it.
"""

import asyncio
import threading

import boto3
import botocore.config
import pytest

from anabranch.local import LocalKinesis

CREDENTIALS = {"region_name": "us-east-1", "aws_access_key_id": "local", "aws_secret_access_key": "local"}


class KinesisThread:
    def __init__(self, **options):
        self._started = threading.Event()
        self._options = options
        self._thread = threading.Thread(target=lambda: asyncio.run(self._main()), daemon=True)
        self._thread.start()
        if not self._started.wait(20):
            raise RuntimeError("the local Kinesis did not start within 20 seconds")
        self.boto3 = self.client()

    async def _main(self):
        self._loop = asyncio.get_running_loop()
        self._stop = asyncio.Event()
        async with LocalKinesis(**self._options) as self.local:
            self.endpoint_url = self.local.endpoint_url
            self.certificate = None if self.local.certificate_path is None else str(self.local.certificate_path)
            self._started.set()
            await self._stop.wait()

    @property
    def faults(self):
        return self.local.faults

    def client(self, **settings):
        """Another boto3 client, without retries, so that each test sees each answer."""
        defaults = {"retries": {"total_max_attempts": 1}, "read_timeout": 10, "max_pool_connections": 30}
        config = botocore.config.Config(**{**defaults, **settings})
        return boto3.client(
            "kinesis", endpoint_url=self.endpoint_url, verify=self.certificate, config=config, **CREDENTIALS
        )

    def run(self, coroutine):
        """The result of a coroutine in the server's own loop."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(20)

    def reset(self):
        self.run(self.local.reset())

    def close(self):
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(20)


async def _goodbyes():
    transports = asyncio.get_running_loop()._transports
    while any(transport._sock is not None for transport in list(transports.values())):  # noqa: ASYNC110
        await asyncio.sleep(0.01)


@pytest.fixture(scope="session")
def goodbyes():
    """Waits until every connection of the running loop is closed.

    aiohttp leaves TLS connections to say goodbye on their own: a loop that ends before leaks them into a later test.
    """
    return _goodbyes


@pytest.fixture(scope="session")
def plain_server():
    server = KinesisThread()
    yield server
    server.close()


@pytest.fixture(scope="session")
def tls_server():
    server = KinesisThread(tls=True)
    yield server
    server.close()


@pytest.fixture
def limited_kinesis():
    server = KinesisThread(limits="aws")
    yield server
    server.close()


@pytest.fixture(params=["plain", "tls"])
def kinesis(request):
    """Every test that asks for this runs twice: in clear text, and over TLS."""
    server = request.getfixturevalue(f"{request.param}_server")
    server.reset()
    return server


@pytest.fixture
def plain_kinesis(plain_server):
    """For what does not depend on TLS."""
    plain_server.reset()
    return plain_server
