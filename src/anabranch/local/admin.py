"""What the local server has and AWS does not: `/health`, and the admin endpoint for faults and a fresh start.

    GET    /health          {"status": "ok", ...} as soon as the server answers
    GET    /_local/faults   the rules, with how often each has matched and struck
    POST   /_local/faults   one rule or a list of them: `{"operation": "PutRecords", "fault": "throttle", "times": 1}`
    DELETE /_local/faults   removes every rule
    POST   /_local/reset    removes every rule and every stream, and creates anew what is created at the start

Unsigned: whoever reaches the port may use it, which is why the server listens on loopback unless told otherwise.
"""

from collections.abc import Awaitable, Callable
from typing import Any, Final

import msgspec

from anabranch._http.server.exchange import Request, Response
from anabranch._version import __version__
from anabranch.local.faults import Fault, Faults

__all__ = ["Admin"]

_RULES: Final = msgspec.json.Decoder(Fault | list[Fault])
_ENCODER: Final = msgspec.json.Encoder()
_JSON: Final = [("content-type", "application/json")]


class Admin:
    def __init__(self, faults: Faults, reset: Callable[[], Awaitable[None]], endpoint: Callable[[], str]) -> None:
        self._faults = faults
        self._reset = reset
        self._endpoint = endpoint

    @staticmethod
    def serves(path: str) -> bool:
        return path == "/health" or path.startswith("/_local/")

    def __call__(self, request: Request) -> Response | Awaitable[Response]:
        if request.path == "/health":
            return self._health(request)
        if request.path == "/_local/faults":
            return self._change_faults(request)
        if request.path == "/_local/reset":
            return self._start_anew() if request.method == "POST" else _refuse(405, "POST resets the server")
        return _refuse(404, f"there is no {request.path}; the admin endpoint has /_local/faults and /_local/reset")

    def _health(self, request: Request) -> Response:
        if request.method not in {"GET", "HEAD"}:
            return _refuse(405, "GET asks for health")
        return _answer({"status": "ok", "server": "anabranch", "version": __version__, "endpoint": self._endpoint()})

    def _change_faults(self, request: Request) -> Response:
        if request.method == "POST":
            try:
                rules = _RULES.decode(request.body)
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                return _refuse(400, f"not a rule or a list of rules: {error}")
            for rule in rules if isinstance(rules, list) else [rules]:
                self._faults.add(rule)
        elif request.method == "DELETE":
            self._faults.clear()
        elif request.method != "GET":
            return _refuse(405, "GET lists the faults, POST adds to them, DELETE removes them")
        return _answer({"faults": self._faults.rules})

    async def _start_anew(self) -> Response:
        await self._reset()
        return _answer({"status": "reset"})


def _answer(value: dict[str, Any]) -> Response:
    return Response(200, _ENCODER.encode(value) + b"\n", list(_JSON))


def _refuse(status: int, message: str) -> Response:
    return Response(status, _ENCODER.encode({"error": message}) + b"\n", list(_JSON))
