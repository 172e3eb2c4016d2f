"""Why a shard makes no progress: a closed set of values, each with a code, its facts as fields, a text and an advice.

Programs compare `code` or the class, never the text. To add a reason, add its class: code, JSON and `explain` follow
from it. Durations are seconds, positions are written as `sequence number:sub-sequence number`.
"""

import re
from typing import ClassVar, Final

import msgspec

_RETRIED: Final = "each worker that starts after the stop tries the record once more"
_OTHERS_TAKE_IT: Final = "nothing to do if another worker is live: it takes the shard in a moment; otherwise start one"
_SLOW_RECORDS: Final = "check the handlers of those records: they run, wait, or have retries that are due later"


def _code(class_name: str) -> str:
    """`WorkersFull` has the code `workers-full`."""
    return re.sub(r"(?<!^)(?=[A-Z])", "-", class_name).lower()


class Reason(msgspec.Struct, frozen=True, kw_only=True, tag_field="code", tag=_code):
    """Why a shard makes no progress. In JSON it is one object with `code`, `text` and its other fields."""

    _words: ClassVar[str] = "{text}"
    """The text, with names of fields in it."""
    advice: ClassVar[str] = ""
    """What to do about it."""

    text: str = ""
    """In words, made from the other fields."""

    def __post_init__(self) -> None:
        msgspec.structs.force_setattr(self, "text", self._sentence())

    def _sentence(self) -> str:
        return self._words.format_map(msgspec.structs.asdict(self))

    @property
    def code(self) -> str:
        """Never changes, unlike the text."""
        return str(self.__struct_config__.tag)

    def __str__(self) -> str:
        return self.text

    def shortened(self, characters_max: int) -> "Reason":
        """A copy for a place with little room: long texts are cut, and all are valid Unicode."""
        cut = {
            name: _cut(value, characters_max)
            for name, value in msgspec.structs.asdict(self).items()
            if isinstance(value, str)
        }
        return msgspec.structs.replace(self, **cut)


def _cut(text: str, characters_max: int) -> str:
    whole = text.encode("utf-8", "backslashreplace").decode()
    return whole if len(whole) <= characters_max else f"{whole[: characters_max - 1]}…"


class UnknownReason(Reason, frozen=True, kw_only=True, tag=False, tag_field=None):
    """Another version of anabranch wrote it. Its code and text are kept."""

    advice = "for advice, use the version of anabranch that reported it"
    code: str


# No worker can take it


class WaitsForParents(Reason, frozen=True, kw_only=True):
    """To keep the order per key, a child shard starts when its parents are finished."""

    advice = "nothing to do: it starts when its parents are finished"
    parents: tuple[str, ...]

    def _sentence(self) -> str:
        return f"it waits for {' and '.join(self.parents)} to finish"


class NoLiveWorker(Reason, frozen=True, kw_only=True):
    """Nobody holds it, and no worker runs."""

    _words = "no worker of the application is alive"
    advice = "start a worker, for example with `anabranch run module:consumer`"


class StreamNotRead(Reason, frozen=True, kw_only=True):
    """Nobody holds it, and the live workers read other streams of the application."""

    _words = "no live worker reads stream {stream}"
    advice = "start a worker that reads this stream, unless the application is done with it: its position is kept"
    stream: str


class ApplicationMoved(Reason, frozen=True, kw_only=True):
    """The application lives in another lease store."""

    _words = "the application was moved to {store}"
    advice = "start its workers with that lease store (leases=)"
    store: str


class WorkersStopping(Reason, frozen=True, kw_only=True):
    """Nobody holds it, and all workers are stopping."""

    _words = "every worker of the application is stopping"
    advice = "start a worker: the present ones are stopping and take no shards"


class WorkersFull(Reason, frozen=True, kw_only=True):
    """Nobody holds it, and all workers hold `max_shards` shards."""

    _words = "every worker holds as many shards as it may (max_shards)"
    advice = "start another worker, or raise max_shards in LeaseSettings"


class NotTakenYet(Reason, frozen=True, kw_only=True):
    """Nobody holds it, and a live worker has room."""

    _words = "it is free and will be taken soon"
    advice = "nothing to do: a live worker takes it in a moment"


# Its worker is not well


class WorkerSilent(Reason, frozen=True, kw_only=True):
    """Its holder sends no heartbeats. It starts no handler calls until the lease store answers it again."""

    _words = (
        "worker {worker_id} has sent no heartbeat for {seconds:.0f} s: it is paused, overloaded, or cut off from the "
        "lease store"
    )
    advice = _OTHERS_TAKE_IT
    worker_id: str
    seconds: float


class WorkerDead(Reason, frozen=True, kw_only=True):
    """The process of its holder is dead."""

    _words = "the process of worker {worker_id} is gone: it did not shut down cleanly"
    advice = _OTHERS_TAKE_IT
    worker_id: str


class StoreUnreachable(Reason, frozen=True, kw_only=True):
    """Its worker may start no handler calls, because the lease store has not acknowledged a heartbeat in time."""

    advice = "check that this worker can reach the lease store; it continues when the store answers"
    error: str | None

    def _sentence(self) -> str:
        return "no heartbeat was acknowledged in time" + ("" if self.error is None else f": {self.error}")


class StoreThrottled(Reason, frozen=True, kw_only=True):
    """Its worker may start no handler calls, because the lease store throttles its heartbeats."""

    _words = "the lease store throttles the heartbeats of its worker: {error}"
    advice = "give the table on-demand billing, or more capacity; the worker continues when a heartbeat is accepted"
    error: str


class StoreAccessDenied(Reason, frozen=True, kw_only=True):
    """Its worker may start no handler calls, because it has no right to use the lease store."""

    _words = "the lease store denies access to its worker: {error}"
    advice = "restore the worker's permissions or credentials; it continues when a heartbeat is accepted"
    error: str


class ClockSkew(Reason, frozen=True, kw_only=True):
    """Its worker may start no handler calls, because AWS rejects its signatures."""

    _words = "the clock of its worker's machine is wrong: {error}"
    advice = "synchronize the clock with NTP (chrony, systemd-timesyncd)"
    error: str


class HandedOver(Reason, frozen=True, kw_only=True):
    """Another worker requested the shard. It is given away when running handler calls have ended."""

    _words = "it is being handed over to {to_member}"
    advice = "nothing to do: its new holder continues"
    to_member: str


class CallsOutliveHandOff(Reason, frozen=True, kw_only=True):
    """With `hand_off="force"`, handler calls were cancelled and still run."""

    advice = "make those handlers return when they are cancelled: then the shard continues"
    to_member: str
    call_count: int

    def _sentence(self) -> str:
        calls = "call still runs" if self.call_count == 1 else "calls still run"
        return f"the hand-off to {self.to_member} waits: {self.call_count} cancelled handler {calls}"


# Somebody paused it


class PausedByProgram(Reason, frozen=True, kw_only=True):
    """The program called `Consumer.pause()`."""

    _words = "the worker is paused by Consumer.pause()"
    advice = "call Consumer.resume() in its program"


class PausedInStore(Reason, frozen=True, kw_only=True):
    """Its lease is marked as paused."""

    _words = "it is paused in the lease store"
    advice = "resume the shard: its lease row is marked as paused"


# It cannot be read


class _FailingInARow(Reason, frozen=True, kw_only=True):
    error: str
    """The last one."""
    failure_count: int
    """In a row."""


class ReadsThrottled(_FailingInARow, frozen=True, kw_only=True):
    """Kinesis throttles its reads: all readers together exceed the limits of the shard."""

    _words = "its reads are throttled ({failure_count} in a row): {error}"
    advice = "nothing to do if it passes: reads slow down; otherwise read the shard with fewer applications"


class ReadsFailing(_FailingInARow, frozen=True, kw_only=True):
    """Its reads fail."""

    _words = "its reads fail ({failure_count} in a row): {error}"
    advice = "reads are retried; if it persists, fix what the error names"


class SubscriptionFailing(_FailingInARow, frozen=True, kw_only=True):
    """With fan-out: its subscriptions fail. After three failures in a row it is polled."""

    _words = "its subscription fails ({failure_count} in a row): {error}"
    advice = "it is retried, and the shard is polled meanwhile; if it persists, fix what the error names"


class SubscriptionInUse(Reason, frozen=True, kw_only=True):
    """With fan-out: the service still counts another subscription of this consumer and shard."""

    _words = "another subscription of its consumer is still open: {error}"
    advice = "nothing to do if it passes in a few seconds; otherwise another process uses the same consumer"
    error: str


class SubscriptionTakenOver(Reason, frozen=True, kw_only=True):
    """With fan-out: another subscription replaced this one. It subscribes again when a heartbeat proves its lease."""

    _words = "another subscription took its place: it waits for a heartbeat that proves its lease"
    advice = "nothing to do if it passes in a few seconds; otherwise check that the lease store can be reached"


class ConsumerNameShared(Reason, frozen=True, kw_only=True):
    """With fan-out: subscriptions with the same consumer take each other over. It is polled for five minutes."""

    _words = "another fleet uses consumer {consumer}"
    advice = "give each application its own consumer: set consumer_name in FanOutSettings, or leave it out"
    consumer: str


class ConsumerMissing(Reason, frozen=True, kw_only=True):
    """With fan-out: the service does not know the consumer. One that the application registered is registered again."""

    _words = "the service does not know consumer {consumer} or this shard: {error}"
    advice = "nothing to do if the application registered it; a consumer_arn that you set must exist"
    consumer: str
    error: str


class SubscriptionDenied(Reason, frozen=True, kw_only=True):
    """With fan-out: the credentials may not call SubscribeToShard."""

    _words = "it may not subscribe: {error}"
    advice = "allow kinesis:SubscribeToShard on the consumer's ARN; the shard is polled meanwhile"
    error: str


class StreamKeyDenied(Reason, frozen=True, kw_only=True):
    """With fan-out: the KMS key that encrypts the stream cannot be used."""

    _words = "the stream's KMS key cannot be used: {error}"
    advice = "check that the key is enabled, and that the credentials may call kms:Decrypt with it"
    error: str


class PollingDenied(Reason, frozen=True, kw_only=True):
    """With fan-out: the shard would be polled while its subscription fails, but GetRecords is not allowed."""

    _words = "{cause}; and it may not be polled meanwhile: {error}"
    advice = "nothing is lost: it continues when it can subscribe; to bridge this, allow kinesis:GetRecords"
    cause: str
    """Why it has no subscription."""
    error: str


class ChildrenUnlisted(Reason, frozen=True, kw_only=True):
    """It was read to its end, but its children could not be looked up."""

    _words = "it was read to its end, but its children could not be listed: {error}"
    advice = "the listing is retried; if it persists, fix what the error names"
    error: str


class ChildrenUnknown(Reason, frozen=True, kw_only=True):
    """It was read to its end, but the stream does not list its children yet."""

    _words = "it was read to its end, but the stream does not list its children yet"
    advice = "nothing to do: it is finished when the stream lists its children"


class BudgetFull(Reason, frozen=True, kw_only=True):
    """It has nothing to handle and is not read, because unfinished records of other shards fill the byte budget."""

    advice = "nothing is lost: reading continues as records finish; if that is too slow, raise the budget"
    seconds: float
    used_bytes: int
    limit_bytes: int
    shard_count: int = 1
    """How many shards of the worker wait for it."""

    def _sentence(self) -> str:
        waiting = f"; {self.shard_count} shards wait" if self.shard_count > 1 else ""
        return (
            f"the byte budget has been full for {self.seconds:.0f} s: unfinished records use {self.used_bytes} of "
            f"{self.limit_bytes} bytes{waiting}"
        )


# Its records do not finish


class _Unfinished(Reason, frozen=True, kw_only=True):
    position: str
    partition_key: str
    seconds: float
    """Since a record of the shard was last finished."""
    children_wait: bool = False
    """The shard was read to its end: its children wait for this record."""

    @property
    def _prefix(self) -> str:
        ended = "the shard has ended and its children wait: " if self.children_wait else ""
        return f"{ended}record {self.position} of key {self.partition_key!r}"


class RecordInHandler(_Unfinished, frozen=True, kw_only=True):
    """A record is still being handled, by a handler or by the program's own loop."""

    advice = "check that record's handler at this place; `Retry(timeout=)` limits the time of a call"
    at: str | None = None
    """The innermost calls with file and line; None if unknown, as in another process."""

    def _sentence(self) -> str:
        return f"{self._prefix} is still being handled after {self.seconds:.0f} s{f', at {self.at}' if self.at else ''}"


class RecordUnfinished(_Unfinished, frozen=True, kw_only=True):
    """A record is not finished although no handler call runs for it."""

    advice = "nothing to do if its retry is due later; with manual acknowledgement, check that ack() is called for it"

    def _sentence(self) -> str:
        return f"{self._prefix} has not been finished for {self.seconds:.0f} s"


class TimeoutIgnored(Reason, frozen=True, kw_only=True):
    """A handler call goes on although its timeout has passed. Its record is retried only after it has ended."""

    advice = "make the handler return: a call in a thread cannot be stopped, one in a process can"
    position: str
    partition_key: str
    timeout: float
    at: str | None = None
    """The innermost calls with file and line; None if unknown."""

    def _sentence(self) -> str:
        at = f" at {self.at}" if self.at else ""
        return f"the handler of record {self.position} ignores its timeout of {self.timeout:g} s{at}"


class LetterNotWritten(Reason, frozen=True, kw_only=True):
    """A record goes to the dead letters, and their destination does not accept it. Its key or shard waits."""

    _words = "record {position} goes to the dead letters, but {destination} does not accept it: {error}"
    advice = (
        "nothing is lost: the letter is written again until the destination accepts it; fix what the error names, or "
        "skip the record"
    )
    position: str
    partition_key: str | None
    """None if the record was trimmed from the stream meanwhile."""
    destination: str
    error: str


class OpenKeysLimit(Reason, frozen=True, kw_only=True):
    """As many keys as a checkpoint can hold have unfinished records."""

    _words = "{key_count} keys have unfinished records, which is the limit"
    advice = _SLOW_RECORDS
    key_count: int


class HeldBackBytesLimit(Reason, frozen=True, kw_only=True):
    """Too many bytes of records wait for unfinished records of their keys."""

    advice = _SLOW_RECORDS
    held_back_bytes: int
    all_shards: bool = False
    """Whether the bytes are those of all shards that share the budget."""

    def _sentence(self) -> str:
        of_all = " of all shards" if self.all_shards else ""
        return f"{self.held_back_bytes} bytes of records{of_all} wait for unfinished records of their keys"


class NoRoomForHeldBack(Reason, frozen=True, kw_only=True):
    """The byte budget has no room for one more record that waits for its key."""

    _words = "the byte budget has no room to read past records that wait for their keys"
    advice = "nothing is lost: reading continues as records finish; if that is too slow, raise the budget"


class ReplayBytesLimit(Reason, frozen=True, kw_only=True):
    """As many bytes after an unfinished record are finished as another worker may have to read again."""

    _words = "record {position} of key {partition_key!r} is unfinished, but {replay_bytes} later bytes are finished"
    advice = "check that record's handler; a larger replay_bytes_max lets other keys get further"
    position: str
    partition_key: str
    replay_bytes: int


# Workers died on a shard


class HandledAlone(Reason, frozen=True, kw_only=True):
    """It is quarantined: one of its records may have crashed its owners. It is handled while nothing else runs."""

    _words = "{owner_count} owners in a row ended without progress: it is quarantined and waits to be handled alone"
    advice = "nothing to do: its next turn comes when the other shards of the worker have had theirs"
    owner_count: int


class WaitsForIsolatedShard(Reason, frozen=True, kw_only=True):
    """Another shard of its worker is quarantined and is being handled alone."""

    _words = "a quarantined shard is handled alone: this one waits for its turn"
    advice = "nothing to do: its turn comes after the record that is being tried now"


# It is stopped at a record


class StoppedAtRecord(Reason, frozen=True, kw_only=True):
    position: str | None = None
    """None if unknown."""
    partition_key: str | None = None
    arrival_seconds: float | None = None
    """When the record arrived in the stream, in seconds since 1970; None if unknown."""

    @property
    def _prefix(self) -> str:
        at = "" if self.position is None else f" at record {self.position} of key {self.partition_key!r}"
        return f"stopped{at}"


class StoppedByHandler(StoppedAtRecord, frozen=True, kw_only=True):
    """The handler of the record failed as often as the policy allows."""

    advice = f"fix the handler for that record, then restart a worker: {_RETRIED}"
    attempts: int
    error: str | None
    """The last one; None if it is not known here."""
    at_shard_end: bool = False
    """Not retried as often as the policy allows, because its shard has ended (`at_shard_end="finish"`)."""

    def _sentence(self) -> str:
        end = ", and it is not retried at the end of the shard (at_shard_end='finish')" if self.at_shard_end else ""
        return f"{self._prefix}: its handler failed{_attempts(self.attempts, self.error)}{end}"


class StoppedByPayload(StoppedAtRecord, frozen=True, kw_only=True):
    """`decode=` refused the payload of the record."""

    advice = f"fix decode= for that record, then restart a worker: {_RETRIED}"
    error: str

    def _sentence(self) -> str:
        return f"{self._prefix}: its payload does not decode: {self.error}"


class LooksLikeOutage(StoppedAtRecord, frozen=True, kw_only=True):
    """So many records fail that it looks like an outage, not like poison. None of them is lost."""

    advice = f"find out what fails, then resume the shard or restart a worker: {_RETRIED}"
    record_count: int
    in_a_row: bool
    """Without one success; otherwise within a minute."""
    error: str | None

    def _sentence(self) -> str:
        how = "in a row" if self.in_a_row else "in a minute"
        last = "" if self.error is None else f", the last one with {self.error}"
        return f"{self._prefix}: looks like an outage, not poison: {self.record_count} failed {how}{last}"


class StoppedByCrashes(StoppedAtRecord, frozen=True, kw_only=True):
    """Several owners in a row died while they handled the record."""

    advice = f"find out what kills its workers at that record, then start a worker again: {_RETRIED}"
    owner_count: int

    def _sentence(self) -> str:
        where = "here without any progress" if self.position is None else "while they handled it"
        return f"{self._prefix}: {self.owner_count} owners in a row died {where}"


def _attempts(count: int, error: str | None) -> str:
    if count == 1:
        return "" if error is None else f" with {error}"
    return f" {count} times" if error is None else f" {count} times, the last time with {error}"


_KINDS: Final = {
    kind.__struct_config__.tag: kind
    for kind in list(globals().values())
    if isinstance(kind, type) and issubclass(kind, Reason) and kind is not UnknownReason and not kind.__subclasses__()
}


def parse_reason(document: object) -> Reason:
    """The reason from its JSON object. An unknown one keeps its code and text, or its facts if it has no text."""
    if not isinstance(document, dict):
        return UnknownReason(code="unknown", text=str(document))
    code = str(document.get("code", "unknown"))
    if code in _KINDS:
        try:
            return msgspec.convert(document, _KINDS[code])
        except msgspec.ValidationError:
            pass  # another version gave it other fields
    facts = [f"{name} {value}" for name, value in document.items() if name not in {"code", "text"}]
    return UnknownReason(code=code, text=str(document.get("text") or f"{code} ({', '.join(facts)})"))
