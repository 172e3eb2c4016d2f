"""One unsigned question to an endpoint: does anybody answer, and what time is it there?

Any answer will do, a refusal too: it needs no credentials, and tells a network that is closed from permissions that are
missing.
"""

import time
from dataclasses import dataclass

from anabranch._aws.endpoints import ServiceAddress
from anabranch._aws.service import USER_AGENT, date_seconds, make_dialer
from anabranch._http.client.http_client import HttpClient
from anabranch._http.client.limits import ClientTimeouts
from anabranch._wire.bodies import JSON

__all__ = ["ProbeAnswer", "probe"]


@dataclass(frozen=True, slots=True)
class ProbeAnswer:
    round_trip_ms: int
    """Connecting included."""
    clock_ahead_ms: int | None
    """How far this machine's clock is ahead of the service's, to half a second; None where it sent no Date."""


async def probe(address: ServiceAddress, *, timeouts: ClientTimeouts | None = None) -> ProbeAnswer:
    timeouts = timeouts or ClientTimeouts()
    http = HttpClient(await make_dialer(address, ("http/1.1",), timeouts), purposes={"probe": 1}, timeouts=timeouts)
    headers = (
        f"host: {address.endpoint.host_header}\r\n"
        f"content-type: {JSON}\r\n"
        "x-amz-target: Kinesis_20131202.ListStreams\r\n"
        f"user-agent: {USER_AGENT}\r\n"
        "content-length: 2\r\n\r\n"
    ).encode("ascii")
    started = time.monotonic()
    try:
        date = await http.post(
            "probe", headers, [b"{}"], lambda response: date_seconds(response.headers.get(b"date")), repeatable=True
        )
    finally:
        await http.close()
    now_ms = time.time_ns() // 1_000_000
    # A Date is cut to its second: half a second later is the best guess.
    ahead_ms = None if date is None else now_ms - round(date * 1000) - 500
    return ProbeAnswer(round((time.monotonic() - started) * 1000), ahead_ms)
