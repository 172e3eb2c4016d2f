"""The health of several worker processes as one: `anabranch run --workers N --health-port P` (rule O2).

Each worker serves its own health on a free port of the loopback interface, and sends the port through a pipe. For each
request the parent asks all of them. The fleet is live if all running workers are; even a busy worker answers at once.
It is ready only if all N are. Their metrics are served together, with the label `worker`.
"""

import asyncio
import os
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final, NamedTuple

import msgspec

from anabranch._http.server.exchange import Request, Response
from anabranch.health import HealthApp, HealthServer, json_page, metrics_page, refusal_of
from anabranch.metrics.prometheus import text_of

ASK_SECONDS: Final = 3.0
_LOOPBACK: Final = "127.0.0.1"


class Worker:
    """The health of one worker process."""

    def __init__(self, number: int) -> None:
        self.number = number
        self._read_end, self.write_end = os.pipe()
        self._port: int | None = None
        self._has_ended = False

    def started(self) -> None:
        """The process has inherited its end of the pipe: waits for the port in the background."""
        os.close(self.write_end)
        asyncio.get_running_loop().add_reader(self._read_end, self._on_port)

    def _on_port(self) -> None:
        text = os.read(self._read_end, 100)
        self._close()
        if text:
            self._port = int(text)

    def end(self) -> None:
        """The process has ended."""
        self._has_ended = True
        self._close()

    def _close(self) -> None:
        if self._read_end >= 0:
            asyncio.get_running_loop().remove_reader(self._read_end)
            os.close(self._read_end)
            self._read_end = -1

    async def ask(self, path: str) -> "Asked":
        if self._has_ended:
            return Asked(self, None, "it has ended")
        if self._port is None:
            return Asked(self, None, "it is starting")
        try:
            async with asyncio.timeout(ASK_SECONDS):
                status, body = await _get(self._port, path)
        except TimeoutError:
            return Asked(self, None, f"its health server did not answer within {ASK_SECONDS:g} s", is_away=False)
        except (OSError, ValueError, EOFError) as error:  # the process is ending: its server is closed
            return Asked(self, None, f"its health server did not answer: {type(error).__name__}")
        return Asked(self, Response(status, body), "")


class Asked(NamedTuple):
    worker: Worker
    answer: Response | None
    why: str
    """Why there is no answer."""
    is_away: bool = True
    """There is no answer because the worker is starting or ending: no reason to restart the others."""


async def _get(port: int, path: str) -> tuple[int, bytes]:
    reader, writer = await asyncio.open_connection(_LOOPBACK, port)
    try:
        writer.write(f"GET {path} HTTP/1.1\r\nhost: {_LOOPBACK}\r\nconnection: close\r\n\r\n".encode())
        head = await reader.readuntil(b"\r\n\r\n")
        return int(head.split(b" ", 2)[1]), await reader.read()
    finally:
        writer.close()


async def serve_to_parent(app: HealthApp, pipe: int) -> HealthServer:
    """In a worker: serves its health, and sends the port to the parent."""
    server = HealthServer(app, host=_LOOPBACK, port=0)
    url = await server.start()
    os.write(pipe, url.rpartition(":")[2].encode())
    os.close(pipe)
    return server


class FleetHealth:
    """In the parent: the answers of all workers as one."""

    def __init__(self, workers: Sequence[Worker]) -> None:
        self._workers = workers

    async def handle(self, request: Request) -> Response:
        path = request.path
        if (refusal := refusal_of(request.method, path)) is not None:
            return refusal
        asked = await asyncio.gather(*(worker.ask(path) for worker in self._workers))
        if path == "/metrics":
            return metrics_page(lambda: text_of(_labelled_families(asked)))
        if path == "/status.json":
            return json_page({"workers": {one.worker.number: _document(one) for one in asked}})
        what = path[1:]
        counted = [one for one in asked if what == "ready" or one.answer is not None or not one.is_away]
        failing = {one.worker.number: _why(one) for one in counted if one.answer is None or one.answer.status != 200}
        return json_page({what: not failing, "workers": failing}, 503 if failing else 200)


def _document(one: Asked) -> Any:
    return {"error": one.why} if one.answer is None else msgspec.Raw(one.answer.body)


def _why(one: Asked) -> list[str]:
    if one.answer is None:
        return [one.why]
    try:
        return [str(reason) for reason in msgspec.json.decode(one.answer.body)["reasons"]]
    except (msgspec.DecodeError, KeyError, TypeError):
        return [f"HTTP {one.answer.status}"]


def _labelled_families(asked: Iterable[Asked]) -> Iterator[Any]:
    """The families of all workers, each sample with the number of its worker."""
    from prometheus_client.parser import text_string_to_metric_families

    for one in asked:
        if one.answer is None or one.answer.status != 200:
            continue
        for family in text_string_to_metric_families(one.answer.body.decode()):
            family.samples = [
                sample._replace(labels={**sample.labels, "worker": str(one.worker.number)}) for sample in family.samples
            ]
            yield family
