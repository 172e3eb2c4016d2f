"""The gateway, in place of API Gateway and the ingress Lambda: WebSockets, the page, and the management API.

    python gateway.py --port 8080

- `GET /` is the page, `GET /poses.json` the hands that it draws.
- `GET /ws` is the WebSocket. A message is one hand; an answer is a list of letters, or `{"number", "error"}`.
- `/@connections/{id}` is API Gateway's management API: POST sends a message to a client, GET says whether it is
  connected, DELETE disconnects it. A client that is gone answers 410, as there.
"""

import argparse
import asyncio
import json
import logging
import secrets
from collections.abc import AsyncIterator
from pathlib import Path

import tracing
from aiohttp import WSMsgType, web
from hands import LETTERS, pose
from ingress import BYTES_MAX, landmarks_from
from messages import LANDMARKS_STREAM, Landmarks

import anabranch

PAGE = Path(__file__).with_name("page.html")
UNCONFIRMED_MAX = 1_000
"""Hands of one client that may be on their way to the stream. Then its socket is not read any further."""


class Gateway:
    def __init__(self) -> None:
        self._producer = anabranch.Producer(
            LANDMARKS_STREAM, encode=Landmarks, linger=0.005, settings=anabranch.ProducerSettings(trace="wrap")
        )
        self._sockets: dict[str, web.WebSocketResponse] = {}

    def app(self) -> web.Application:
        app = web.Application()
        app.add_routes(
            [
                web.get("/", self._page),
                web.get("/poses.json", self._poses),
                web.get("/ws", self._socket),
                web.post("/@connections/{connection_id}", self._post),
                web.get("/@connections/{connection_id}", self._describe),
                web.delete("/@connections/{connection_id}", self._disconnect),
            ]
        )
        app.cleanup_ctx.append(self._open_producer)
        app.on_shutdown.append(self._close_sockets)
        return app

    async def _open_producer(self, _: web.Application) -> AsyncIterator[None]:
        async with self._producer:
            yield

    async def _page(self, _: web.Request) -> web.Response:
        return web.Response(text=PAGE.read_text(), content_type="text/html")

    async def _poses(self, _: web.Request) -> web.Response:
        return web.json_response({letter: pose(letter).tolist() for letter in LETTERS})

    # clients

    async def _socket(self, request: web.Request) -> web.WebSocketResponse:
        socket = web.WebSocketResponse(max_msg_size=2 * BYTES_MAX, heartbeat=20)
        await socket.prepare(request)
        connection_id = secrets.token_urlsafe(12)
        self._sockets[connection_id] = socket
        unconfirmed: asyncio.Queue[tuple[int, anabranch.Delivery] | None] = asyncio.Queue(UNCONFIRMED_MAX)
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._report_failures(socket, unconfirmed))
                async for message in socket:
                    if message.type in {WSMsgType.TEXT, WSMsgType.BINARY}:
                        await self._accept(socket, connection_id, message.data, unconfirmed)
                await unconfirmed.put(None)
        finally:
            del self._sockets[connection_id]
        return socket

    async def _accept(
        self,
        socket: web.WebSocketResponse,
        connection_id: str,
        body: str | bytes,
        unconfirmed: asyncio.Queue[tuple[int, anabranch.Delivery] | None],
    ) -> None:
        try:
            hand = landmarks_from(body, connection_id)
        except ValueError as error:
            await send(socket, {"number": None, "error": str(error)})
            return
        with tracing.tracer.start_as_current_span("receive hand"):
            delivery = await self._producer.put(hand, hand.session_id)
        await unconfirmed.put((hand.number, delivery))

    async def _report_failures(
        self,
        socket: web.WebSocketResponse,
        unconfirmed: asyncio.Queue[tuple[int, anabranch.Delivery] | None],
    ) -> None:
        """Tells the client about hands that did not reach the stream. It sends them again."""
        while (waiting := await unconfirmed.get()) is not None:
            number, delivery = waiting
            result = await delivery
            if not result.delivered:
                await send(socket, {"number": number, "error": result.error})

    # API Gateway's management API

    async def _post(self, request: web.Request) -> web.Response:
        socket = self._sockets.get(request.match_info["connection_id"])
        try:
            text = (await request.read()).decode()
        except UnicodeDecodeError:
            return web.json_response({"message": "the data is not UTF-8"}, status=400)
        if socket is None or not await send_text(socket, text):
            return gone()
        return web.Response()

    async def _describe(self, request: web.Request) -> web.Response:
        socket = self._sockets.get(request.match_info["connection_id"])
        return gone() if socket is None or socket.closed else web.json_response({"identity": {"sourceIp": "127.0.0.1"}})

    async def _disconnect(self, request: web.Request) -> web.Response:
        socket = self._sockets.get(request.match_info["connection_id"])
        if socket is None:
            return gone()
        await socket.close()
        return web.Response(status=204)

    async def _close_sockets(self, _: web.Application) -> None:
        for socket in list(self._sockets.values()):
            await socket.close(code=1001)


async def send(socket: web.WebSocketResponse, message: dict[str, object]) -> bool:
    return await send_text(socket, json.dumps(message))


async def send_text(socket: web.WebSocketResponse, text: str) -> bool:
    """False if the client is gone."""
    try:
        await socket.send_str(text)
    except (ConnectionError, RuntimeError):
        return False
    return not socket.closed


def gone() -> web.Response:
    return web.json_response({"message": None}, status=410, headers={"x-amzn-ErrorType": "GoneException"})


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--host", default="127.0.0.1")
    options.add_argument("--port", type=int, default=8080)
    given = options.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    tracing.configure("gateway")
    web.run_app(Gateway().app(), host=given.host, port=given.port, print=None, access_log=None)


if __name__ == "__main__":
    main()
