"""The front door: an HTTP request in, the service's answer out, with the headers, statuses and bodies that AWS gives.

AWS looks at a request in a fixed order, and clients can tell: origin, method, content type, body, operation, signature,
and only then what the call says. Faults strike after the signature. Answers that need neither a fault nor a disk are
made at once, without a task.
"""

import asyncio
import os
from base64 import b64encode
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Protocol
from uuid import UUID

from anabranch._http.server.exchange import Abandon, Answer, Headers, Request, Response, StreamingResponse
from anabranch.local.actions.registry import REQUESTS
from anabranch.local.bodies import CBOR, CODECS, JSON, BodyCodec, Call
from anabranch.local.calls import LocalState, PutRecordsRequest
from anabranch.local.errors import LocalError
from anabranch.local.event_streams import CONTENT_TYPE as EVENT_STREAM, EventStreams
from anabranch.local.faults import NO_FAULT, CallPlan, Faults, Loss
from anabranch.local.signatures import check_signature_form
from anabranch.local.state.identifiers import decode_iterator

__all__ = ["Durability", "FrontDoor"]

_SERVICE: Final = "Kinesis_20131202"
_EXPOSED_HEADERS: Final = "x-amzn-RequestId,x-amzn-ErrorType,x-amz-request-id,x-amz-id-2,x-amzn-ErrorMessage,Date"
_UNDETERMINED: Final = b"""\
<AccessDeniedException>
  <Message>Unable to determine service/operation name to be authorized</Message>
</AccessDeniedException>
"""
_UNKNOWN: Final = b"<UnknownOperationException/>\n"
_LOSSES: Final[dict[Loss, Abandon]] = {"hang_up": Abandon.HANG_UP, "silence": Abandon.SILENCE}


class Durability(Protocol):
    """Where changes are kept, if they are kept."""

    @property
    def failure(self) -> LocalError | None:
        """Why nothing can be kept any more."""

    async def durable(self) -> None:
        """Returns when everything changed so far is on disk."""


@dataclass(slots=True)
class _Refused(Exception):  # noqa: N818 -- an answer found early
    response: Response


@dataclass(slots=True)
class _Incoming:
    """A request that has passed the door."""

    operation: str
    codec: BodyCodec
    call: Call
    headers: Headers


class FrontDoor:
    def __init__(
        self,
        state: LocalState,
        faults: Faults,
        streams: EventStreams,
        *,
        clock_ms: Callable[[], int],
        durability: Durability | None,
        after_call: Callable[[], None],
    ) -> None:
        self._state = state
        self._faults = faults
        self._streams = streams
        self._clock_ms = clock_ms
        self._durability = durability
        self._after_call = after_call

    def __call__(self, request: Request) -> Answer | Awaitable[Answer]:
        headers = _answer_headers(request)
        try:
            incoming = _read(request, headers)
        except _Refused as refused:
            return refused.response
        plan = self._plan(incoming)
        if plan is NO_FAULT and self._durability is None:
            return self._perform(incoming, plan)
        return self._perform_slowly(incoming, plan)

    def _plan(self, incoming: _Incoming) -> CallPlan:
        if self._faults.is_empty:
            return NO_FAULT
        call = incoming.call
        if isinstance(call, PutRecordsRequest):
            stream, slot_count = _stream_name(call.stream_members()), len(call.records)
        else:
            stream, slot_count = _stream_name(call), len(call.get("Records", ()))
        return self._faults.plan(incoming.operation, stream=stream, slot_count=slot_count, now_ms=self._clock_ms())

    async def _perform_slowly(self, incoming: _Incoming, plan: CallPlan) -> Answer:
        if plan.delay_ms:
            await asyncio.sleep(plan.delay_ms / 1000)
        if plan.loss_before is not None:
            return _LOSSES[plan.loss_before]
        if plan.refusal is not None:
            return _error(plan.refusal, incoming.codec, incoming.headers)
        try:
            answer = await self._perform_durably(incoming, plan)
        except LocalError as error:
            return _error(error, incoming.codec, incoming.headers)
        if plan.loss_after is not None and plan.events is None:
            return _LOSSES[plan.loss_after]  # a subscription stays, unread, until it is taken over: it took effect
        return answer

    async def _perform_durably(self, incoming: _Incoming, plan: CallPlan) -> Answer:
        """Reads wait as well: nobody may see what a crash could still undo."""
        if self._durability is None:
            return self._perform(incoming, plan)
        if self._durability.failure is not None:
            raise self._durability.failure
        answer = self._perform(incoming, plan)
        await self._durability.durable()
        return answer

    def _perform(self, incoming: _Incoming, plan: CallPlan) -> Response | StreamingResponse:
        try:
            if incoming.operation == "SubscribeToShard":
                return self._subscribe(incoming, plan)
            answer = self._call(incoming, plan)
        except LocalError as error:
            return _error(error, incoming.codec, incoming.headers)
        finally:
            self._after_call()
        return _response(200, incoming.codec.encode(answer) if answer else b"", incoming.codec, incoming.headers)

    def _call(self, incoming: _Incoming, plan: CallPlan) -> Any:
        now_ms = self._clock_ms()
        slots = plan.refused_slots
        if isinstance(incoming.call, PutRecordsRequest):
            return self._state.put_records(incoming.call, now_ms=now_ms, refused_slots=slots)
        return self._state.call(incoming.operation, incoming.call, now_ms=now_ms, refused_slots=slots)

    def _subscribe(self, incoming: _Incoming, plan: CallPlan) -> StreamingResponse:
        assert isinstance(incoming.call, dict)
        subscription = self._state.subscribe(incoming.call, now_ms=self._clock_ms())
        chunks = self._streams.chunks(subscription, incoming.codec, plan)
        return StreamingResponse(200, chunks, [*incoming.headers, ("content-type", EVENT_STREAM)])


def _answer_headers(request: Request) -> Headers:
    random = os.urandom(16 + 72)
    headers = [("x-amzn-RequestId", str(UUID(bytes=random[:16], version=4)))]
    if "origin" not in request.headers:
        headers.append(("x-amz-id-2", b64encode(random[16:]).decode("ascii")))
        return headers
    headers.append(("access-control-allow-origin", "*"))
    if request.method != "OPTIONS":
        headers.append(("x-amz-id-2", b64encode(random[16:]).decode("ascii")))
        headers.append(("access-control-expose-headers", _EXPOSED_HEADERS))
    return headers


def _read(request: Request, headers: Headers) -> _Incoming:
    """The checks of the door, in AWS's order."""
    if request.method == "OPTIONS" and "origin" in request.headers:
        raise _Refused(_preflight(request, headers))
    if request.method != "POST":
        raise _Refused(Response(403, _UNDETERMINED, headers))
    content_type = request.headers.get("content-type", "").partition(";")[0].strip()
    service, _, operation = request.headers.get("x-amz-target", "").partition(".")
    known = service == _SERVICE and operation in REQUESTS
    codec = CODECS.get(content_type)
    if not request.body:
        codec = codec or CBOR
        raise _Refused(_bare_error("SerializationException" if known else "UnknownOperationException", codec, headers))
    if codec is None:
        raise _Refused(_foreign_content(content_type, headers, targeted=bool(service and operation)))
    if not known:
        raise _Refused(_bare_error("UnknownOperationException", codec, headers))
    try:
        check_signature_form(request.headers, request.query)
        call = codec.decode(operation, request.body)
    except LocalError as error:
        raise _Refused(_error(error, codec, headers)) from None
    return _Incoming(operation, codec, call, headers)


def _preflight(request: Request, headers: Headers) -> Response:
    for asked, granted in (
        ("access-control-request-headers", "access-control-allow-headers"),
        ("access-control-request-method", "access-control-allow-methods"),
    ):
        if asked in request.headers:
            headers.append((granted, request.headers[asked]))
    headers.append(("access-control-max-age", "172800"))
    return Response(200, b"", headers)


def _foreign_content(content_type: str, headers: Headers, *, targeted: bool) -> Response:
    if content_type == "application/json":  # AWS answers in the envelope of an older protocol, with success
        error = {"__type": "com.amazon.coral.service#UnknownOperationException", "message": None}
        return Response(
            200, JSON.encode({"Output": error, "Version": "1.0"}), [*headers, ("content-type", "application/json")]
        )
    return Response(404, _UNKNOWN, headers) if targeted else Response(403, _UNDETERMINED, headers)


def _bare_error(code: str, codec: BodyCodec, headers: Headers) -> Response:
    """What AWS says before it has looked at a request's members: a code without a message."""
    return _response(400, codec.encode({"__type": code}), codec, headers)


def _error(error: LocalError, codec: BodyCodec, headers: Headers) -> Response:
    if not error.message:
        return _bare_error(error.code, codec, headers)
    return _response(error.status, codec.encode(error.members()), codec, headers)


def _response(status: int, body: bytes, codec: BodyCodec, headers: Headers) -> Response:
    return Response(status, body, [*headers, ("content-type", codec.content_type)])


def _stream_name(call: Mapping[str, Any]) -> str | None:
    if "StreamName" in call:
        return str(call["StreamName"])
    if "ShardIterator" in call:
        iterator = decode_iterator(call["ShardIterator"])
        return None if iterator is None else iterator.stream_name
    return _name_in_arn(call.get("StreamARN") or call.get("ConsumerARN") or call.get("ResourceARN"))


def _name_in_arn(arn: str | None) -> str | None:
    """`arn:aws:kinesis:region:account:stream/NAME/consumer/...`"""
    parts = (arn or "").partition(":stream/")[2].split("/")
    return parts[0] or None
