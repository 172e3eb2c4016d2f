"""The outbound process: reads the letters and sends them to the clients through API Gateway's management API.

    GATEWAY_URL=http://127.0.0.1:8080 python outbound.py

Letters of one client in one batch travel in one message. A client that is gone needs no answer. Any other failure is
retried, in order; while the gateway is down, the shard waits.
"""

import asyncio
import os
from collections import defaultdict
from urllib.parse import quote

import aiohttp
import msgspec
import tracing
from botocore.auth import SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.session import Session
from messages import LETTERS_STREAM, Letter

import anabranch

REQUESTS_AT_ONCE = 16
GONE = 410


class Outbound:
    """Signed requests to the management API, at most sixteen at once."""

    def __init__(self, url: str, http: aiohttp.ClientSession) -> None:
        self._url = url
        self._http = http
        session = Session()
        self._signer = SigV4Auth(session.get_credentials(), "execute-api", session.get_config_variable("region"))

    async def send_batch(self, batch: anabranch.Batch[Letter]) -> None:
        by_client: dict[str, list[Letter]] = defaultdict(list)
        for record in batch.records:
            by_client[record.value.connection_id].append(record.value)
        spans = [tracing.start_span("send letter", record.trace_parent) for record in batch.records]
        async with asyncio.TaskGroup() as tasks:
            for connection_id, letters in by_client.items():
                tasks.create_task(self._send(connection_id, letters))
        for span in spans:
            span.end()

    async def _send(self, connection_id: str, letters: list[Letter]) -> None:
        url = f"{self._url}/@connections/{quote(connection_id, safe='')}"
        request = AWSRequest("POST", url, data=msgspec.json.encode(letters))
        self._signer.add_auth(request)
        async with self._http.post(url, data=request.data, headers=dict(request.headers)) as response:
            if response.status != GONE:
                response.raise_for_status()


async def main() -> None:
    consumer = anabranch.Consumer(
        LETTERS_STREAM,
        app="letters-outbound",
        decode=Letter,
        read="fanout",
        on_failure=anabranch.Retry(attempts=1_000_000, backoff=0.1, backoff_max=5.0),
        settings=anabranch.ConsumerSettings(trace=True),
    )
    connector = aiohttp.TCPConnector(limit=REQUESTS_AT_ONCE)
    async with aiohttp.ClientSession(connector=connector) as http:
        outbound = Outbound(os.environ["GATEWAY_URL"], http)
        await consumer.run_batches(outbound.send_batch, max_records=500, max_wait=0.01)


if __name__ == "__main__":
    tracing.configure("outbound")
    asyncio.run(main())
