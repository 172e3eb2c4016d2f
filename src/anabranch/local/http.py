"""The Kinesis API over HTTP: requests in, responses out, with AWS's headers, status codes and bodies.

AWS checks a request in a fixed order that clients can observe: origin, method, content type, operation, empty body,
signature, and then the members of the body. Faults apply after these checks. A call without a fault and without a
journal is answered synchronously, without a task. The admin endpoint, which AWS does not have, is at the end.
"""

import asyncio
import ipaddress
import os
from base64 import b64encode
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal
from uuid import UUID

import msgspec

from anabranch._http.server.exchange import Abandon, Answer, HangUp, Headers, Request, Response, StreamingResponse
from anabranch._version import __version__
from anabranch._wire.event_stream import encode_frame, encode_headers
from anabranch.local.actions.records import PutRecordsRequest
from anabranch.local.bodies import CBOR, CODECS, BodyCodec, RequestMembers
from anabranch.local.errors import LocalError, serialization
from anabranch.local.faults import NO_FAULT, CallPlan, Fault, Faults
from anabranch.local.journal import Journal
from anabranch.local.service import LocalState
from anabranch.local.shapes import REQUESTS
from anabranch.local.state.identifiers import decode_iterator
from anabranch.local.state.subscription import Subscription

_SERVICE: Final = "Kinesis_20131202"
_EXPOSED_HEADERS: Final = "x-amzn-RequestId,x-amzn-ErrorType,x-amz-request-id,x-amz-id-2,x-amzn-ErrorMessage,Date"
_UNDETERMINED_BODY: Final = b"""\
<AccessDeniedException>
  <Message>Unable to determine service/operation name to be authorized</Message>
</AccessDeniedException>
"""
_UNKNOWN_OPERATION_BODY: Final = b"<UnknownOperationException/>\n"
_EVENT_STREAM: Final = "application/vnd.amazon.eventstream"
_AUTHORIZATION_PARTS: Final = ("Credential", "Signature", "SignedHeaders")
_FAULT_RULES_DECODER: Final = msgspec.json.Decoder(Fault | list[Fault])


class EventStreams:
    """The bodies of SubscribeToShard responses: event frames for as long as the client is connected.

    The subscription decides what to send and when. A stream sleeps until its shard changes (`wake`) or the
    subscription's next deadline has come. It is polled only when the client reads, so no unread events accumulate.
    """

    def __init__(self, clock_ms: Callable[[], int]) -> None:
        self._clock_ms = clock_ms
        self._changes: dict[tuple[str, str], asyncio.Event] = {}
        """Set at the next change of a shard, for each (stream name, shard id) that a stream waits for."""

    def wake(self, stream_name: str, shard_id: str) -> None:
        """Call it when the shard got records, was closed or deleted, or when another subscription took over."""
        change = self._changes.pop((stream_name, shard_id), None)
        if change is not None:
            change.set()

    async def chunks(self, subscription: Subscription, codec: BodyCodec, plan: CallPlan) -> AsyncGenerator[bytes, None]:
        shard = subscription.stream_name, subscription.shard_id
        event_headers = _message_headers(codec, "event", "SubscribeToShardEvent")
        sent = 0
        try:
            yield encode_frame(_message_headers(codec, "event", "initial-response"), codec.encode({}))
            while not subscription.is_over:
                if plan.events is not None and sent >= plan.events:
                    await _end_by_fault(plan)
                event = subscription.poll(self._clock_ms())
                if event is None:
                    await self._wait(shard, subscription.next_deadline_ms)
                else:
                    sent += 1
                    headers = _message_headers(codec, "exception", event.type) if event.is_exception else event_headers
                    yield encode_frame(headers, codec.encode(event.members))
        finally:
            subscription.close()

    async def _wait(self, shard: tuple[str, str], deadline_ms: int) -> None:
        change = self._changes.setdefault(shard, asyncio.Event())
        try:
            async with asyncio.timeout(max(0, deadline_ms - self._clock_ms()) / 1000):
                await change.wait()
        except TimeoutError:
            pass


async def _end_by_fault(plan: CallPlan) -> None:
    if plan.loss_after == "hang_up":
        raise HangUp
    await asyncio.Event().wait()  # sends nothing until the client disconnects


def _message_headers(codec: BodyCodec, message_type: Literal["event", "exception"], kind: str) -> bytes:
    return encode_headers(
        {f":{message_type}-type": kind, ":content-type": codec.content_type, ":message-type": message_type}
    )


@dataclass(slots=True)
class _Incoming:
    """A request that passed the checks of `_read`."""

    operation: str
    codec: BodyCodec
    members: RequestMembers
    answer_headers: Headers


@dataclass(slots=True)
class KinesisHttpApp:
    state: LocalState
    faults: Faults
    streams: EventStreams
    clock_ms: Callable[[], int]
    journal: Journal | None
    after_call: Callable[[], None]
    """Called after each call that had no fault before it. The call may have changed the state."""

    def __call__(self, request: Request) -> Answer | Awaitable[Answer]:
        incoming = _read(request, _common_headers(request))
        if isinstance(incoming, Response):
            return incoming
        plan = self._plan(incoming)
        if plan is NO_FAULT and self.journal is None:
            return self._perform(incoming, plan)
        return self._perform_with_faults(incoming, plan)

    def _plan(self, incoming: _Incoming) -> CallPlan:
        if self.faults.is_empty:
            return NO_FAULT
        members = incoming.members
        if isinstance(members, PutRecordsRequest):
            stream, records = _stream_name(members.stream_members()), members.records
        else:
            stream, records = _stream_name(members), members.get("Records", [])
        return self.faults.plan(incoming.operation, stream=stream, slot_count=len(records), now_ms=self.clock_ms())

    async def _perform_with_faults(self, incoming: _Incoming, plan: CallPlan) -> Answer:
        if plan.delay_ms:
            await asyncio.sleep(plan.delay_ms / 1000)
        if plan.loss_before is not None:
            return Abandon(plan.loss_before)
        journal = self.journal
        error = plan.refusal or (journal.failure if journal is not None else None)
        if error is not None:
            return _error(error, incoming.codec, incoming.answer_headers)
        answer = self._perform(incoming, plan)
        if journal is not None:  # reads wait too: no response may show a change that a crash could still undo
            try:
                await journal.durable()
            except LocalError as failure:
                return _error(failure, incoming.codec, incoming.answer_headers)
        if plan.loss_after is not None and plan.events is None:
            return Abandon(plan.loss_after)  # SubscribeToShard took effect: another subscription has to take over
        return answer

    def _perform(self, incoming: _Incoming, plan: CallPlan) -> Response | StreamingResponse:
        now_ms, members, slots = self.clock_ms(), incoming.members, plan.refused_slots
        try:
            if isinstance(members, PutRecordsRequest):
                answer: Any = self.state.put_records(members, now_ms=now_ms, refused_slots=slots)
            elif incoming.operation == "SubscribeToShard":
                chunks = self.streams.chunks(self.state.subscribe(members, now_ms=now_ms), incoming.codec, plan)
                return StreamingResponse(200, chunks, [*incoming.answer_headers, ("content-type", _EVENT_STREAM)])
            else:
                answer = self.state.call(incoming.operation, members, now_ms=now_ms, refused_slots=slots)
        except LocalError as error:
            return _error(error, incoming.codec, incoming.answer_headers)
        finally:
            self.after_call()
        return _response(200, answer, incoming.codec, incoming.answer_headers)


def _common_headers(request: Request) -> Headers:
    """The headers of every answer: ids, and those for web pages of other origins (CORS)."""
    random = os.urandom(16 + 72)  # x-amz-id-2 has 72 bytes
    request_id, id_2 = UUID(bytes=random[:16], version=4), b64encode(random[16:]).decode("ascii")
    headers = [("x-amzn-RequestId", str(request_id))]
    if "origin" not in request.headers:
        headers.append(("x-amz-id-2", id_2))
        return headers
    headers.append(("access-control-allow-origin", "*"))
    if request.method != "OPTIONS":
        headers += [("x-amz-id-2", id_2), ("access-control-expose-headers", _EXPOSED_HEADERS)]
    return headers


def _read(request: Request, answer_headers: Headers) -> _Incoming | Response:
    """Checks the request in AWS's order. Some of AWS's errors have a code, but no message."""
    if request.method == "OPTIONS" and "origin" in request.headers:
        return _preflight(request, answer_headers)
    if request.method != "POST":
        return Response(403, _UNDETERMINED_BODY, answer_headers)
    content_type = request.headers.get("content-type", "").partition(";")[0].strip()
    service, _, operation = request.headers.get("x-amz-target", "").partition(".")
    codec = CODECS.get(content_type)
    if codec is None and request.body:
        if service and operation:
            return Response(404, _UNKNOWN_OPERATION_BODY, answer_headers)
        return Response(403, _UNDETERMINED_BODY, answer_headers)
    codec = codec or CBOR  # an empty body of an unknown content type is answered in CBOR
    if service != _SERVICE or operation not in REQUESTS:
        return _error(LocalError("UnknownOperationException", ""), codec, answer_headers)
    if not request.body:
        return _error(serialization(""), codec, answer_headers)
    try:
        check_signature_form(request.headers)
        return _Incoming(operation, codec, codec.decode(operation, request.body), answer_headers)
    except LocalError as error:
        return _error(error, codec, answer_headers)


def _preflight(request: Request, headers: Headers) -> Response:
    for asked, granted in (
        ("access-control-request-headers", "access-control-allow-headers"),
        ("access-control-request-method", "access-control-allow-methods"),
    ):
        if asked in request.headers:
            headers.append((granted, request.headers[asked]))
    headers.append(("access-control-max-age", "172800"))
    return Response(200, b"", headers)


def _error(error: LocalError, codec: BodyCodec, headers: Headers) -> Response:
    return _response(error.status, error.members(), codec, headers)


def _response(status: int, members: Any, codec: BodyCodec, headers: Headers) -> Response:
    body = codec.encode(members) if members else b""
    return Response(status, body, [*headers, ("content-type", codec.content_type)])


def _stream_name(members: Mapping[str, Any]) -> str | None:
    if "StreamName" in members:
        return str(members["StreamName"])
    if (iterator := decode_iterator(members.get("ShardIterator", ""))) is not None:
        return iterator.stream_name
    arn: str = members.get("StreamARN") or members.get("ConsumerARN") or members.get("ResourceARN") or ""
    return arn.partition(":stream/")[2].partition("/")[0] or None


def check_signature_form(headers: dict[str, str]) -> None:
    """The signature must be complete, but it is not verified: all credentials are accepted."""
    authorization = headers.get("authorization")
    if authorization is None:
        raise LocalError("MissingAuthenticationTokenException", "Missing Authentication Token")
    missing = [
        f"Authorization header requires '{part}' parameter."
        for part in _AUTHORIZATION_PARTS
        if f"{part}=" not in authorization
    ]
    if "x-amz-date" not in headers and "date" not in headers:
        missing.append("Authorization header requires existence of either a 'X-Amz-Date' or a 'Date' header.")
    if missing:
        raise LocalError("IncompleteSignatureException", f"{' '.join(missing)} Authorization={authorization}")


@dataclass(slots=True)
class AdminHttpApp:
    """`/health`, and the admin endpoint for faults and resets:

        GET    /health          {"status": "ok", ...} as soon as the server answers
        GET    /_local/faults   the rules; each counts how often it has `matched` and `struck` (was applied)
        POST   /_local/faults   adds one rule or a list: `{"operation": "PutRecords", "fault": "throttle", "times": 1}`
        DELETE /_local/faults   removes every rule
        POST   /_local/reset    removes every rule and stream, and creates the streams of `create` again

    Requests are not authenticated, so the server listens on loopback by default. But web pages in a browser on this
    machine can also send requests to it. So all paths except /health need two things. One is the header `x-anabranch`,
    which a page cannot send to another origin. The other is a Host header that is not a public domain name, because an
    attacker's domain can resolve to this machine (DNS rebinding).
    """

    faults: Faults
    reset: Callable[[], Awaitable[None]]
    endpoint: Callable[[], str]
    host: str

    @staticmethod
    def serves(path: str) -> bool:
        return path == "/health" or path.startswith("/_local/")

    def __call__(self, request: Request) -> Response | Awaitable[Response]:
        if request.path == "/health":
            return self._health(request)
        if not is_local_host(request.headers.get("host", ""), self.host):
            return _admin_error(403, "use an IP address, localhost or the host that the server was started with")
        if "x-anabranch" not in request.headers:
            return _admin_error(403, "send the header `x-anabranch: 1`: it proves that no web page sends this request")
        if request.path == "/_local/faults":
            return self._change_faults(request)
        if request.path == "/_local/reset" and request.method != "POST":
            return _admin_error(405, "use POST to reset the server")
        if request.path == "/_local/reset":
            return self._reset_server()
        return _admin_error(
            404, f"unknown path {request.path}; the admin endpoint has /_local/faults and /_local/reset"
        )

    def _health(self, request: Request) -> Response:
        if request.method not in {"GET", "HEAD"}:
            return _admin_error(405, "use GET")
        return _admin_response(
            {"status": "ok", "server": "anabranch", "version": __version__, "endpoint": self.endpoint()}
        )

    def _change_faults(self, request: Request) -> Response:
        if request.method == "POST":
            try:
                rules = _FAULT_RULES_DECODER.decode(request.body)
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                return _admin_error(400, f"not a fault rule or a list of them: {error}")
            for rule in rules if isinstance(rules, list) else [rules]:
                self.faults.add(rule)
        elif request.method == "DELETE":
            self.faults.clear()
        elif request.method != "GET":
            return _admin_error(405, "use GET to list faults, POST to add, DELETE to remove all")
        return _admin_response({"faults": self.faults.rules})

    async def _reset_server(self) -> Response:
        await self.reset()
        return _admin_response({"status": "reset"})


def is_local_host(host: str, server_host: str) -> bool:
    """Whether a Host header cannot be a public domain name. Allowed are an IP address, `localhost`, a name without a
    dot, such as a container's, and the host that the server was started with.
    """
    name = host.lower().rpartition("]")[0].removeprefix("[") or host.lower().partition(":")[0]
    if not name or name == server_host.lower() or "." not in name or name.endswith(".localhost"):
        return bool(name)
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _admin_response(value: dict[str, Any], status: int = 200) -> Response:
    return Response(status, msgspec.json.encode(value) + b"\n", [("content-type", "application/json")])


def _admin_error(status: int, message: str) -> Response:
    return _admin_response({"error": message}, status)
